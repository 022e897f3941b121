"""A repository's id: its tokenizer comes from the hub where one is reached (a server on this machine, with the hub's paths), else the error says so."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.forked import ROOT

pytest.importorskip("huggingface_hub", reason="needs the extra hf")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def tokenizer_files() -> dict[str, bytes]:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(["some text"], trainers.BpeTrainer(vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False))  # fmt: skip
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    return {"tokenizer.json": made.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode(), "pytorch_model.bin": b"never asked for"}  # fmt: skip


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    files, asked = tokenizer_files(), []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            path = self.path.partition("?")[0]
            if path.startswith("/api/models/owner/name/tree/"):
                tree = [{"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()} for name, content in files.items()]  # fmt: skip
                self.answer(json.dumps(tree).encode(), "application/json")
            elif path.startswith("/api/models/owner/name"):
                listed = {"id": "owner/name", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
                self.answer(json.dumps(listed).encode(), "application/json")
            elif path.startswith("/owner/name/resolve/") and path.rpartition("/")[2] in files:
                self.answer(files[path.rpartition("/")[2]], "application/octet-stream")
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        do_HEAD = do_GET

        def answer(self, content: bytes, kind: str) -> None:
            self.send_response(200)
            facts = {"Content-Type": kind, "Content-Length": str(len(content)), "X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}  # fmt: skip
            for name, value in facts.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()
    thread.join()


def inspect(name: str, home: Path, endpoint: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "PYTHONPATH": paths, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # fmt: skip
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-W", "ignore", "-m", "mpbridge", "data", "inspect", "--tokenizer", name]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)


def test_a_repository_is_fetched_once_and_then_found_in_the_cache(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, asked = hub
    first = inspect("owner/name", tmp_path, endpoint)
    assert first.returncode == 0, first.stderr
    assert "owner/name" in first.stdout
    assert "end of text" in first.stdout
    assert any("tokenizer.json" in path for path in asked)
    assert not any("pytorch_model" in path for path in asked), "weights are nobody's tokenizer"
    before = len(asked)
    again = inspect("owner/name", tmp_path, endpoint)
    assert again.stdout == first.stdout
    assert len(asked) == before, "the copy in the cache is enough"


def test_a_repository_that_does_not_exist_is_named_in_one_line(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    done = inspect("nobody/nothing", tmp_path, hub[0])
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "data.tokenizer='nobody/nothing' is not on this machine and could not be downloaded" in done.stderr
    assert "give a local folder" in done.stderr
    assert "the hub has no such repository" in done.stderr


def test_a_hub_that_cannot_be_reached_is_named_without_its_librarys_page(tmp_path: Path) -> None:
    done = inspect("nope", tmp_path, "http://127.0.0.1:9")
    assert done.returncode == 2
    assert "(the hub cannot be reached): give a local folder" in done.stderr
    assert len(done.stderr) < 250
