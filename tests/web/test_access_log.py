import logging
import os

from ratchet.web.access_log import NonblockingHandler


def test_a_full_pipe_drops_lines_and_blocks_nothing():
    read_end, write_end = os.pipe()
    record = logging.makeLogRecord({"msg": "GET /v1/models " + "x" * 1000})
    with open(read_end, "rb") as reader, open(write_end, "w") as stream:
        handler = NonblockingHandler(stream)
        for _ in range(200):  # 200 kB, more than a pipe holds
            handler.emit(record)
        assert len(os.read(reader.fileno(), 2**20)) < 200_000
        handler.emit(record)
        assert os.read(reader.fileno(), 2**20).decode() == record.getMessage() + "\n"
