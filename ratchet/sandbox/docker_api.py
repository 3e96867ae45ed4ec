"""A client for the part of the Docker Engine API that sandboxes need.

Its calls block, so `docker.py` runs them in threads.

Source: https://docs.docker.com/reference/api/engine/ (1.41 and later). Everything read from a
container is treated as hostile.
"""

from __future__ import annotations

import io
import json
import posixpath
import re
import ssl
import struct
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ratchet.sandbox.base import SandboxError, TooLarge

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")

# The oldest and newest supported API version
OLDEST_VERSION = (1, 41)
NEWEST_VERSION = (1, 47)
CHUNK_BYTES = 1 << 16
# The stream (1: stdout, 2: stderr), and the length of the data that follows.
FRAME_HEADER = struct.Struct(">B3xI")
MAX_ANSWER_BYTES = 4 << 20
# Files put into a container belong to root. Its processes run as another user, which must be able
# to change them.
PUT_FILE_MODE = 0o777


class EngineUnavailable(SandboxError):
    """The engine failed, or could not be reached; a retry may help."""


class DockerNotFound(SandboxError):
    """The requested container, image or path does not exist."""


def read_field(answer: Any, kind: type[T], *names: str, default: T | None = None) -> T:
    """Return a field of the engine's answer, which may be of any shape.

    Args:
        answer: The JSON of the answer.
        kind: The type of the field.
        names: The keys of the nested objects, outermost first.
        default: The value of a field that is missing or null; None: it must be there.

    Raises:
        EngineUnavailable: The field is missing or of another type.
    """
    value = answer
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    if value is None and default is not None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise EngineUnavailable(
            f"the engine's answer has no {'.'.join(names)} of type {kind.__name__}: {answer!r:.80}"
        )
    return value


def read_id(answer: Any) -> str:
    """Return the id of a new container or exec. Raises EngineUnavailable if there is none."""
    name = read_field(answer, str, "Id")
    if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
        raise EngineUnavailable(f"the engine's answer has an id that is none: {name!r:.80}")
    return name


class DockerStream:
    """The connection of an attached exec or container, which carries frames of both outputs."""

    def __init__(self, response: httpx2.Response) -> None:
        self._response = response
        self._network = response.extensions["network_stream"]
        self._buffer = b""

    def iter_frames(self, deadline: float) -> Iterator[tuple[int, bytes]]:
        """Yield (stream, data) until the engine closes the connection; see `FRAME_HEADER`.

        Raise TimeoutError at the deadline (of time.monotonic), or EngineUnavailable if the
        connection breaks or ends within a frame.
        """
        while header := self._read_exactly(FRAME_HEADER.size, deadline):
            stream, size = FRAME_HEADER.unpack(header)
            if stream not in (0, 1, 2):
                raise EngineUnavailable(
                    f"the engine's stream is not multiplexed: it begins a frame with {header[:4]!r}"
                )
            while size:
                data = self._read_up_to(min(size, CHUNK_BYTES), deadline)
                if not data:
                    raise EngineUnavailable("the engine's stream was cut within a frame")
                size -= len(data)
                yield stream, data

    def _read_exactly(self, size: int, deadline: float) -> bytes:
        """Return the next `size` bytes of a header, or b"" if the stream has ended."""
        header = b""
        while len(header) < size:
            data = self._read_up_to(size - len(header), deadline)
            if not data and header:
                raise EngineUnavailable("the engine's stream was cut within a frame's header")
            if not data:
                return b""
            header += data
        return header

    def _read_up_to(self, max_bytes: int, deadline: float) -> bytes:
        import httpcore2

        if not self._buffer:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise TimeoutError
            try:
                self._buffer = self._network.read(CHUNK_BYTES, timeout=remaining_s)
            except httpcore2.ReadTimeout:
                raise TimeoutError from None
            except (httpcore2.NetworkError, OSError) as error:
                raise EngineUnavailable(f"the engine's stream broke: {error!r}") from error
        data = self._buffer[:max_bytes]
        self._buffer = self._buffer[max_bytes:]
        return data

    def close(self) -> None:
        self._response.close()


class DockerEngine:
    """A client of one Docker engine, or of Podman's service.

    Attributes:
        is_podman: True for Podman, which ignores the options of a container's new volumes.
    """

    def __init__(self, address: str, certificates: Path | None, timeout_s: float) -> None:
        """Connect to the engine, or raise SandboxError if none answers or it is too old."""
        import httpx2

        scheme, _, path = address.partition("://")
        limits = httpx2.Limits(max_connections=None)
        verify = _load_tls_context(certificates) if certificates else True
        transport = httpx2.HTTPTransport(
            uds=f"/{path.lstrip('/')}" if scheme == "unix" else None,
            verify=verify,
            limits=limits,
        )
        base = "http://docker" if scheme == "unix" else address
        self.address, self._timeout_s = address, timeout_s
        self._client = httpx2.Client(
            transport=transport, base_url=base, timeout=timeout_s, trust_env=False
        )
        self._version = ""
        answer = self.json("GET", "/version")
        api_version = read_field(answer, str, "ApiVersion")
        components = read_field(answer, list, "Components", default=[])
        self.is_podman = any("Podman" in str(component) for component in components)
        version = tuple(int(part) for part in api_version.split(".")[:2] if part.isdecimal())
        if version < OLDEST_VERSION:
            self.close()
            raise SandboxError(
                f"the engine at {address} speaks API {api_version}: 1.41 (Docker 20.10) or later "
                "is needed"
            )
        self._version = "/v{}.{}".format(*min(version, NEWEST_VERSION))

    def json(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        """Return the JSON of the engine's answer; {} if the answer is empty.

        Raise DockerNotFound, EngineUnavailable, or SandboxError if the engine refuses the request.
        """
        with self._request(method, path, query, json=body) as response:
            data = self._read(response, MAX_ANSWER_BYTES)
        try:
            return json.loads(data) if data.strip() else {}
        except (ValueError, RecursionError):
            raise EngineUnavailable(
                f"the engine answered {method} {path} with {data[:80]!r}, which is no JSON"
            ) from None

    def attach(self, path: str, body: Any = None, **query: Any) -> DockerStream:
        """Return the stream of an attached container or exec, which the caller must close.

        Raise the errors of `json`.
        """
        import httpx2

        headers = {"Connection": "Upgrade", "Upgrade": "tcp"}
        request = self._client.build_request(
            "POST", self._version + path, params=query, json=body, headers=headers
        )
        try:
            response = self._client.send(request, stream=True)
        except (httpx2.RequestError, httpx2.InvalidURL) as error:
            raise self._make_unreachable_error(error) from error
        if response.status_code != 101:
            with _closing(response):
                self._check(response, "POST", path)
            raise EngineUnavailable(
                f"the engine answered POST {path} with {response.status_code}, it must upgrade the "
                "connection"
            )
        return DockerStream(response)

    def put(self, container: str, folder: str, files: Mapping[str, bytes]) -> None:
        """Write files into the container; their keys are paths relative to `folder`."""
        tar_file = io.BytesIO()
        with tarfile.open(fileobj=tar_file, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for name, data in _list_entries(files):
                entry = tarfile.TarInfo(name)
                entry.mode, entry.mtime = PUT_FILE_MODE, int(time.time())
                if data is None:
                    entry.type = tarfile.DIRTYPE
                else:
                    entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data or b""))
        path = f"/containers/{container}/archive"
        query = {"path": folder, "noOverwriteDirNonDir": "true"}
        headers = {"Content-Type": "application/x-tar"}
        with self._request(
            "PUT", path, query, content=tar_file.getvalue(), headers=headers
        ) as response:
            self._read(response, MAX_ANSWER_BYTES)

    def get(self, container: str, path: str, max_bytes: int) -> dict[str, bytes]:
        """Return the regular files at or below `path`; keys are paths relative to its parent.

        Links and devices are left out. Raise DockerNotFound, or TooLarge if the archive exceeds
        `max_bytes` bytes.
        """
        with self._request("GET", f"/containers/{container}/archive", {"path": path}) as response:
            data = self._read(response, max_bytes)
        files = {}
        try:
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
                for entry in archive:
                    name = posixpath.normpath(entry.name)
                    if (
                        entry.isreg()
                        and not name.startswith(("/", ".."))
                        and (file := archive.extractfile(entry))
                    ):
                        files[name] = file.read()
        except tarfile.TarError as error:
            raise EngineUnavailable(
                f"the engine's archive of {path} can't be read: {error}"
            ) from error
        return files

    def pull(self, image: str) -> None:
        """Fetch an image, or raise SandboxError with the registry's message."""
        name, _, tag = (
            image.rpartition(":") if ":" in image.rpartition("/")[2] else (image, "", "latest")
        )
        with self._request("POST", "/images/create", {"fromImage": name, "tag": tag}) as response:
            # The engine reports its progress, so the time limit holds for each part.
            for line in response.iter_lines():
                if '"error"' in line:
                    raise SandboxError(f"image '{image}' could not be fetched: {_read_error(line)}")

    def has_image(self, image: str) -> bool:
        try:
            self.json("GET", f"/images/{image}/json")
        except DockerNotFound:
            return False
        return True

    def build(self, image: str, context: bytes, timeout_s: float) -> None:
        """Build an image from a tar archive with a Dockerfile.

        Raise SandboxError with the builder's message. The builder may use the network.
        """
        query = {"t": image, "rm": "true"}
        headers = {"Content-Type": "application/x-tar"}
        with self._request(
            "POST", "/build", query, content=context, headers=headers, timeout=timeout_s
        ) as response:
            for line in response.iter_lines():
                if '"error"' in line:
                    raise SandboxError(f"image '{image}' could not be built: {_read_error(line)}")

    def remove(self, container: str) -> None:
        """Stop and remove the container, unless it is already gone or being removed."""
        try:
            self.json("DELETE", f"/containers/{container}", force="true", v="true")
        except DockerNotFound:
            pass
        except EngineUnavailable as error:
            # Podman fails to kill a container that is ending, and removes it when it has ended.
            if not any(phrase in str(error) for phrase in ("already in progress", "improper")):
                raise

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def _request(
        self, method: str, path: str, query: Mapping[str, Any], **body: Any
    ) -> Iterator[httpx2.Response]:
        import httpx2

        try:
            with self._client.stream(
                method, self._version + path, params=query, **body
            ) as response:
                self._check(response, method, path)
                yield response
        except (httpx2.RequestError, httpx2.InvalidURL) as error:
            raise self._make_unreachable_error(error) from error

    def _read(self, response: httpx2.Response, max_bytes: int) -> bytes:
        """Return an answer's body.

        Raises TooLarge, or EngineUnavailable if the engine takes longer than its time limit.
        """
        deadline = time.monotonic() + self._timeout_s
        data = bytearray()
        for chunk in response.iter_bytes():
            data += chunk
            if len(data) > max_bytes:
                raise TooLarge(f"the engine's answer is larger than {max_bytes} bytes")
            if time.monotonic() > deadline:
                raise EngineUnavailable(
                    f"the engine's answer took longer than timeout_s={self._timeout_s:g}"
                )
        return bytes(data)

    def _check(self, response: httpx2.Response, method: str, path: str) -> None:
        """Raise the error that a response reports, if it is not a success."""
        if response.is_success or response.status_code == 101:
            return
        text = self._read(response, MAX_ANSWER_BYTES)
        try:
            reason = json.loads(text)["message"]
        except (ValueError, KeyError, TypeError, RecursionError):
            reason = text[:200].decode("utf-8", "replace")
        message = (
            f"the engine at {self.address} answered {method} {path} with "
            f"{response.status_code}: {reason}"
        )
        if response.status_code == 404:
            raise DockerNotFound(message)
        raise (
            EngineUnavailable(message)
            if response.status_code == 409 or response.is_server_error
            else SandboxError(message)
        )

    def _make_unreachable_error(self, error: Exception) -> EngineUnavailable:
        return EngineUnavailable(
            f"no Docker engine answers at {self.address} ({error!r}): is it running, and is this "
            "its address?"
        )


def _read_error(line: str) -> str:
    """Return the message of a line of progress that reports an error."""
    try:
        return str(json.loads(line)["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return line[:1000]


@contextmanager
def _closing(response: httpx2.Response) -> Iterator[None]:
    try:
        yield
    finally:
        response.close()


def _list_entries(files: Mapping[str, bytes]) -> Sequence[tuple[str, bytes | None]]:
    """Return all directories, then the files.

    The engine would create missing directories itself, but only root could write to them.
    """
    folders = {str(folder) for name in files for folder in Path(name).parents} - {"."}
    return [*((folder, None) for folder in sorted(folders)), *files.items()]


def _load_tls_context(certificates: Path) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
        context.load_cert_chain(certificates / "cert.pem", certificates / "key.pem")
    except OSError as error:
        raise SandboxError(f"the certificates in {certificates} can't be read: {error}") from error
    return context
