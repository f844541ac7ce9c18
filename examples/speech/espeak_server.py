"""Speech for Greenroom by espeak-ng: `espeak_server.py PORT`. The standard library and the program, nothing else.

Shows what an engine behind `command` has to do for `POST /v1/audio/speech`: check what it is sent, answer errors in the
shape of OpenAI's, and stop working for a caller that has left. A text is never part of a command line: it goes through
a pipe.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import select
import shutil
import socket
import subprocess
import sys
import wave
from array import array
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROGRAM = "espeak-ng"
# The formats that the program makes without help; others would need an encoder.
TYPES = {"wav": "audio/wav", "pcm": "audio/pcm"}
# OpenAI's voices, as voices that the program has. Others are taken as its own, such as de or en-us+f3.
VOICES = {"alloy": "en-us", "echo": "en-us+m3", "fable": "en-gb", "onyx": "en-us+m7", "nova": "en-us+f2"}
USUAL_VOICE = "en-us"
# The program's own samples in a second, and those of OpenAI's pcm.
RATE, PCM_RATE = 22_050, 24_000
BODY_BYTES_MAX = 64 * 1024
INPUT_CHARS_MAX = 4_096
# Words in a minute at speed 1, and what the program takes.
WORDS_A_MINUTE, SLOWEST, FASTEST = 175, 80, 450
SPEEDS = (0.25, 4.0)
# It speaks thousands of times faster than is heard. An hour of sound is far more than any input gives.
SECONDS_MAX = 60


class Refused(Exception):
    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status


class Speaker(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send(200 if self.path == "/health" else 404, b'{"status": "ok"}', "application/json")

    def do_POST(self) -> None:
        try:
            if self.path != "/v1/audio/speech":
                raise Refused(f"There is no {self.path} here.", status=404)
            asked = _read(self._body())
            sound = _spoken(asked, self.connection)
        except Refused as refused:
            kind = {"type": "invalid_request_error", "code": "invalid_request"}
            error = {"message": str(refused), **kind, "param": refused.param}
            self._send(refused.status, json.dumps({"error": error}).encode(), "application/json")
            return
        except _Left:
            self.close_connection = True
            return
        length = {"X-Audio-Seconds": f"{len(sound) / RATE:.3f}"}
        body = _wav(sound) if asked["format"] == "wav" else _at_rate(sound, PCM_RATE).tobytes()
        self._send(200, body, TYPES[asked["format"]], length)

    def _body(self) -> bytes:
        size = int(self.headers.get("Content-Length", 0))
        if size > BODY_BYTES_MAX:
            self.close_connection = True
            raise Refused(f"The body has {size} bytes, more than {BODY_BYTES_MAX}.", status=413)
        return self.rfile.read(size)

    def _send(self, status: int, body: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Only errors are told."""


def _read(body: bytes) -> dict[str, Any]:
    """What is asked for, checked. Raises Refused."""
    try:
        asked = json.loads(body)
    except ValueError:
        raise Refused("The body is not JSON.") from None
    if not isinstance(asked, dict):
        raise Refused("The body must be a JSON object.")
    text, voice = asked.get("input"), asked.get("voice") or USUAL_VOICE
    if not isinstance(text, str) or not text.strip():
        raise Refused("input must be a text to speak.", "input")
    if len(text) > INPUT_CHARS_MAX:
        raise Refused(f"input has {len(text)} characters, more than {INPUT_CHARS_MAX}.", "input")
    if not isinstance(voice, str) or (voice := VOICES.get(voice, voice)).partition("+")[0] not in voices():
        raise Refused(f"There is no such voice; there are {', '.join([*VOICES, *sorted(voices())])}.", "voice")
    format = asked.get("response_format") or "wav"
    if not isinstance(format, str) or format not in TYPES:
        raise Refused(f"response_format must be {' or '.join(TYPES)}; there is no encoder here.", "response_format")
    speed = asked.get("speed", 1.0)
    if isinstance(speed, bool) or not isinstance(speed, int | float) or not SPEEDS[0] <= speed <= SPEEDS[1]:
        raise Refused(f"speed must be a number from {SPEEDS[0]} to {SPEEDS[1]}.", "speed")
    return {"text": text, "voice": voice, "format": format, "speed": speed}


class _Left(Exception):
    """The caller has left."""


def _spoken(asked: dict[str, Any], caller: socket.socket) -> array[int]:
    """Its samples. Raises Refused, or _Left once the caller has."""
    words = round(min(max(WORDS_A_MINUTE * asked["speed"], SLOWEST), FASTEST))
    command = [PROGRAM, "--stdin", "--stdout", "-b", "1", "-s", str(words), "-v", asked["voice"]]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={"PATH": "/usr/bin:/bin"}
    ) as program:
        try:
            data: bytes | None = asked["text"].encode("utf-8", "replace")
            for _ in range(SECONDS_MAX * 10):
                if _has_left(caller):
                    raise _Left
                try:
                    sound, _ = program.communicate(data, timeout=0.1)
                    break
                except subprocess.TimeoutExpired:
                    data = None
            else:
                raise Refused("The program took too long.", status=503)
        finally:
            program.kill()
    _, found, samples = sound.partition(b"data")
    if program.returncode or not found:
        raise Refused("The program could not speak this.", "input", status=500)
    # It writes while it speaks, so the length that follows is made up.
    return array("h", samples[4 : len(samples) - len(samples) % 2])


def _has_left(caller: socket.socket) -> bool:
    """True once the caller has closed its side: it has something to read, and that is nothing."""
    readable, _, _ = select.select([caller], [], [], 0)
    return bool(readable) and not caller.recv(1, socket.MSG_PEEK)


def _wav(samples: array[int]) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(RATE)
        written.writeframes(samples.tobytes())
    return file.getvalue()


def _at_rate(samples: array[int], rate: int) -> array[int]:
    """The same sound with so many samples in a second, drawn as a line between those there are."""
    step, last = RATE / rate, len(samples) - 1
    places = (number * step for number in range(int(len(samples) / step)))
    return array("h", (_between(samples, place, last) for place in places))


def _between(samples: array[int], place: float, last: int) -> int:
    left = int(place)
    right = min(left + 1, last)
    return round(samples[left] + (samples[right] - samples[left]) * (place - left))


@functools.cache
def voices() -> frozenset[str]:
    """The languages that the program speaks, by its own list."""
    said = subprocess.run([PROGRAM, "--voices"], capture_output=True, text=True, timeout=20, check=True).stdout
    return frozenset(line.split()[1] for line in said.splitlines()[1:])


if __name__ == "__main__":
    if shutil.which(PROGRAM) is None:
        sys.exit(f"there is no {PROGRAM}; as root: apt-get install espeak-ng")
    voices()
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Speaker).serve_forever()
