"""A server that speaks OpenEnv's protocol and errs as told.

A text "N" adds N to a sum that the seed begins; "7" ends the episode. The texts "error", "die",
"nan", "silence", "garbage", "nested", "twice", "late" and "fields" are faults. Calls of tools do
the same by the tool `add`.
"""

from __future__ import annotations

import asyncio
import json
import threading
from http import HTTPStatus

from websockets.asyncio.server import serve

SCHEMA = {
    "action": {
        "properties": {"metadata": {}, "text": {"type": "string"}, "note": {"type": "string"}},
        "required": ["text"],
    }
}
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}


class StubServer:
    def __init__(self, capacity=4, schema=None):
        self.capacity, self.schema = capacity, schema or SCHEMA
        self.late = False
        self.n_open, self.n_opened, self.resets, self.tools = 0, 0, [], [TOOL]
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait()

    def _run(self, ready):
        async def main():
            self._stop = asyncio.Event()
            async with serve(
                self._handle, "127.0.0.1", 0, process_request=self._answer_http
            ) as server:
                self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
                ready.set()
                await self._stop.wait()

        self._loop.run_until_complete(main())

    def _answer_http(self, connection, request):
        if request.path == "/schema":
            return connection.respond(HTTPStatus.OK, json.dumps(self.schema))
        return None

    async def _handle(self, connection):
        if self.n_open >= self.capacity:  # said before it is asked, as OpenEnv's server does
            return await self._send(connection, "error", code="CAPACITY_REACHED", message="full")
        self.n_open, self.n_opened, total = self.n_open + 1, self.n_opened + 1, 0
        try:
            async for text in connection:
                message = json.loads(text)
                data = message.get("data", {})
                if message["type"] == "close":
                    return None
                if message["type"] == "reset":
                    self.resets.append(data)
                    total = data["seed"]
                    await self._observe(connection, total)
                    continue
                is_call = "type" in data
                if data.get("type") == "list_tools":
                    await self._send(connection, "observation", observation={"tools": self.tools},
                                     reward=None, done=False)  # fmt: skip
                    continue
                word = data["arguments"]["number"] if is_call else data["text"]
                if word == "die":
                    return await connection.close(1011)
                if word == "silence":
                    continue
                if word == "garbage":
                    await connection.send("[]")
                elif word == "nested":
                    await connection.send("[" * 100_000)
                elif word == "twice":
                    await self._observe(connection, total)
                    await self._observe(connection, total, reward=9.0, done=True)
                elif word == "fields":
                    await self._send(connection, "error", code="VALIDATION_ERROR", message="no",
                                     errors=[{"type": "missing", "msg": "Field required"}])  # fmt: skip
                elif word == "late":  # the second answer comes with that to the next request
                    await self._observe(connection, total, reward=9.0)
                    self.late = True
                elif self.late:
                    await self._observe(connection, total, reward=9.0, done=True)
                    await self._observe(connection, total, reward=0.5, done=True)
                elif word == "error":
                    await self._send(connection, "error", code="EXECUTION_ERROR", message="oops")
                elif word == "nan":
                    await self._observe(connection, total, reward=float("nan"))
                elif is_call and word == "slow":
                    fault = {"error_type": "timeout", "message": "too slow"}
                    await self._observe(connection, total, error=fault)
                elif is_call and not str(word).isdigit():
                    fault = {"error_type": "invalid_args", "message": "no number"}
                    await self._observe(connection, total, error=fault)
                elif not str(word).isdigit():
                    inner = {"type": "missing", "msg": "Field required", "loc": ["text", "x"]}
                    errors = {"odd": ["x"], "none": 3, "inner": [inner]}.get(
                        word, [{"msg": "Input should be a number"}]
                    )
                    await self._send(connection, "error", code="VALIDATION_ERROR", message="no",
                                     errors=errors)  # fmt: skip
                else:
                    total += int(word)
                    more = {"result": {"data": total}} if is_call else {}
                    await self._observe(
                        connection, total, reward=0.5, done=str(word) == "7", **more
                    )
        finally:
            self.n_open -= 1
        return None

    async def _observe(self, connection, total, reward=None, done=False, **more):
        observation = {"sum": total, "metadata": {"x": 1}, **more}
        await self._send(
            connection, "observation", observation=observation, reward=reward, done=done
        )

    async def _send(self, connection, kind, **data):
        await connection.send(json.dumps({"type": kind, "data": data}))

    def close(self):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
