"""`orcinus pull`, `list` and `rm` against a stand-in for the Hub: what is fetched, resumed and refused, and how."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from services.cli.app import app
from services.hub.fetch import NEEDED
from services.hub.store import hold
from services.launcher.model_check import model_problem, read_model
from shared.errors import ConfigurationError
from shared.settings import CommonSettings
from tests.support.checkpoints.gguf import write_model, write_parts
from tests.support.launcher import ROOT, clean_env
from tests.support.stand_ins.hub import StandInHub

NAME = "acme/tiny"
TOKEN = "hf_do-not-show"
WEIGHTS_BYTES = 3 << 20


@functools.cache
def weights() -> bytes:
    """Return safetensors with one tensor of bytes that do not repeat."""
    size = WEIGHTS_BYTES
    header = json.dumps({"w": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}).encode()
    numbers = b"".join(hashlib.sha256(b"%d" % index).digest() for index in range(size // 32))
    return len(header).to_bytes(8, "little") + header + numbers


def files(**more: bytes) -> dict[str, bytes]:
    config = {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    return {
        "config.json": json.dumps(config).encode(), "tokenizer.json": b"{}", "README.md": b"# Tiny",
        "model.safetensors": weights(), "pytorch_model.bin": b"pickle", **more,
    }  # fmt: skip


class Machine:
    """A user with an empty cache; the Hub is the stand-in."""

    def __init__(self, home: Path, hub: StandInHub) -> None:
        self.home, self.hub = home, hub
        self.directory = home / "hub" / "models--acme--tiny"

    def run(self, *args: str, code: int = 0, typed: str = "", token: str = "", **settings: Any) -> str:
        """Run the command in this process and return its output. settings: constants of huggingface_hub."""
        url = self.hub.url
        values = {
            "ENDPOINT": url, "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(self.home / "hub"), "HF_TOKEN_PATH": str(self.home / "token"),
            "AGENT_HARNESSES_PATH": str(self.home / "harnesses"), "HF_HUB_DISABLE_XET": True,
            "DOWNLOAD_CHUNK_SIZE": 1 << 16, **settings,
        }  # fmt: skip
        with patch.multiple(constants, **values), patch.dict(os.environ, {"HF_TOKEN": token}):
            done = CliRunner().invoke(app, args, input=typed)
        said = done.output
        if isinstance(done.exception, ConfigurationError):
            said, done.exit_code = f"{said}error: {done.exception}", 2
        return self._checked(said, done.exit_code, code)

    def run_process(self, *args: str, code: int = 0, before: str = "true", **env: str) -> str:
        """Run it in a separate process. before: a command of the shell that starts it."""
        settings = {"HF_HOME": str(self.home), "HF_ENDPOINT": self.hub.url, "HF_HUB_DISABLE_XET": "1", **env}
        command = ["bash", "-c", f'{before}; exec "$0" "$@"', sys.executable, "-m", "services.cli", *args]
        done = subprocess.run(command, cwd=ROOT, env=clean_env(**settings), capture_output=True, text=True, timeout=120)
        return self._checked(done.stdout + done.stderr, done.returncode, code)

    def _checked(self, said: str, found: int, code: int) -> str:
        assert found == code, said
        assert TOKEN not in said and "signature=" not in said and "Traceback" not in said
        return said

    def snapshot(self, revision: str = "main") -> Path:
        return self.directory / "snapshots" / (self.directory / "refs" / revision).read_text()


@pytest.fixture
def hub() -> Iterator[StandInHub]:
    with StandInHub() as hub:
        yield hub


@pytest.fixture
def machine(tmp_path: Path, hub: StandInHub) -> Machine:
    """Its Hub has NAME."""
    hub.add(NAME, files())
    return Machine(tmp_path / "home", hub)


@pytest.fixture
def pulled(machine: Machine) -> Machine:
    machine.run("pull", NAME)
    machine.hub.seen.clear()
    return machine


def test_pull_fetches_what_is_served_and_no_pickles(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    (there,) = machine.hub.repositories[NAME]
    said = machine.run_process("pull", NAME, HF_TOKEN=TOKEN, HF_DEBUG="1", HF_HUB_VERBOSITY="debug")
    snapshot = machine.snapshot()
    assert snapshot.name == there.commit and "3.0 MiB" in said
    assert {path.name: path.read_bytes() for path in snapshot.iterdir()} == {
        name: there.files[name] for name in ("config.json", "tokenizer.json", "model.safetensors")
    }
    storage = [seen for seen in machine.hub.seen if seen.is_storage]
    assert storage and all(seen.authorization is None for seen in storage)  # another host gets no token
    of_it = [seen for seen in machine.hub.seen if NAME in seen.path]
    assert {seen.authorization for seen in of_it} == {f"Bearer {TOKEN}"}
    assert all(TOKEN not in path.read_text(errors="replace") for path in machine.home.rglob("*") if path.is_file())

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(machine.home / "hub"))
    settings = CommonSettings(model=Path(NAME))
    assert (settings.model, settings.served_model_name) == (snapshot, NAME)


def test_cut_connection_is_resumed_in_the_same_run(machine: Machine) -> None:
    machine.hub.trouble.cut_after["model.safetensors"] = 1 << 20
    machine.run("pull", NAME)
    assert (machine.snapshot() / "model.safetensors").read_bytes() == weights()
    ranges = [seen.range for seen in machine.hub.seen if seen.is_storage]
    assert ranges[0] is None and ranges[1] is not None and len(ranges) == 2


def test_failed_run_is_resumed_by_the_next(machine: Machine) -> None:
    done = 1 << 20
    blob = machine.directory / "blobs" / hashlib.sha256(weights()).hexdigest()
    said = machine.run_process("pull", NAME, code=2, before="ulimit -f 1024")  # as on a full disk
    assert "cannot be written" in said and "goes on from there" in said
    assert not blob.exists() and not (machine.directory / "refs").exists()  # half a model has no name
    assert "run `orcinus pull acme/tiny`" in machine.run("list") and "can be served" not in machine.run("list")
    machine.hub.seen.clear()
    assert f"going on at {done >> 20}.0 MiB" in machine.run("pull", NAME)
    assert [seen.range for seen in machine.hub.seen if seen.is_storage] == [f"bytes={done}-"]
    assert blob.read_bytes() == weights()
    assert machine.hub.fetched() == {"model.safetensors": 1}


@pytest.mark.parametrize(("name", "kind"), [("model.safetensors", "SHA-256"), ("tokenizer.json", "Git SHA-1")])
def test_content_with_another_digest_is_removed_and_refused(machine: Machine, name: str, kind: str) -> None:
    machine.hub.trouble.wrong.add(name)
    said = machine.run("pull", NAME, code=2)
    assert f"{name}: {kind} is not" in said and "HF_ENDPOINT" in said
    assert not (machine.directory / "refs").exists()
    machine.hub.trouble.wrong.clear()
    machine.run("pull", NAME)
    assert machine.snapshot().is_dir()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_digest_that_is_a_path_removes_and_writes_nothing(machine: Machine, tmp_path: Path, name: str) -> None:
    (tmp_path / "mine").write_text("not of the cache")
    for place in (str(tmp_path / "mine"), "../../../../mine", str(tmp_path / "new")):
        machine.hub.trouble.stated_digest[name] = place
        said = machine.run("pull", NAME, code=2)
        assert f"{name}: its digest is {place!r}" in said and "HF_ENDPOINT" in said
        assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["mine"]


def test_commit_that_is_a_path_is_refused(machine: Machine, tmp_path: Path) -> None:
    machine.hub.trouble.stated_commit = str(tmp_path / "elsewhere")
    said = machine.run("pull", NAME, code=2)
    assert f"its commit is {str(tmp_path / 'elsewhere')!r}" in said and "HF_ENDPOINT" in said


@pytest.mark.parametrize("name", ["LICENSE/../../../../../mine", "/mine.gguf", "LICENSE\x1b[2J"])
def test_file_with_a_name_that_leads_out_is_left_out(machine: Machine, name: str) -> None:
    machine.hub.add(NAME, files(**{name: b"x"}))
    machine.hub.repositories[NAME] = machine.hub.repositories[NAME][1:]
    machine.run("pull", NAME)
    assert {path.name for path in machine.snapshot().iterdir()} == set(NEEDED) | {"model.safetensors"}


def test_file_that_another_tool_damaged_is_fetched_again(machine: Machine) -> None:
    blob = machine.directory / "blobs" / hashlib.sha256(weights()).hexdigest()
    blob.parent.mkdir(parents=True)
    blob.write_bytes(b"cut off")
    assert "damaged" in machine.run("pull", NAME)
    assert blob.read_bytes() == weights()


def test_too_small_disk_is_an_error_before_anything_is_fetched(machine: Machine) -> None:
    machine.hub.trouble.stated_size["model.safetensors"] = 1 << 60
    said = machine.run("pull", NAME, code=2)
    assert f"needs {1 << 30}.0 GiB of disk" in said and "HF_HOME" in said
    assert not machine.hub.fetched()


def test_gated_model_is_an_error_with_the_page_to_accept(machine: Machine) -> None:
    machine.hub.repositories[NAME][0].gated = True
    machine.hub.token = TOKEN
    said = machine.run("pull", NAME, code=2)
    assert f"gated; accept its conditions at {machine.hub.url}/{NAME} and set HF_TOKEN" in said
    assert "with the account of HF_TOKEN" in machine.run("pull", NAME, code=2, token="hf_other")
    machine.run("pull", NAME, token=TOKEN)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("acme/none", "neither a directory here nor a model at"),
        (f"{NAME}@v9", "has no revision v9"),
        ("tiny", "not a name of the Hub; write ORG/NAME"),
        ("acme/../tiny", "not a name of the Hub"),
        ("https://huggingface.co/acme/tiny/tree/main", "not a name of the Hub; write acme/tiny"),
    ],
)
def test_missing_model_is_an_error(machine: Machine, name: str, said: str) -> None:
    assert said in machine.run("pull", name, code=2)


def test_revision_is_fetched_beside_main(machine: Machine) -> None:
    old = machine.hub.add(NAME, files(**{"tokenizer.json": b'{"old": 1}'}), refs=("v1",))
    machine.run("pull", NAME)
    machine.run("pull", f"{NAME}@v1")
    machine.run("pull", f"{NAME}@{old.commit}")
    assert machine.snapshot("v1").name == old.commit != machine.snapshot().name
    assert machine.hub.fetched()["model.safetensors"] == 1  # the same weights
    machine.run("rm", "--yes", f"{NAME}@v1")
    assert (machine.snapshot() / "model.safetensors").read_bytes() == weights()


def test_sharded_weights_are_those_of_the_index(machine: Machine) -> None:
    parts = {f"model-0000{number}-of-00002.safetensors": weights() + bytes(number) for number in (1, 2)}
    index = {"model.safetensors.index.json": json.dumps({"weight_map": dict(zip("ab", parts, strict=True))}).encode()}
    there = files(**parts, **index, **{"consolidated.safetensors": b"twice"})
    del there["model.safetensors"]
    machine.hub.repositories[NAME] = []
    machine.hub.add(NAME, there)
    machine.run("pull", NAME)
    assert {path.name for path in machine.snapshot().glob("*.safetensors")} == set(parts)


def test_repository_without_safetensors_is_refused_with_its_formats(machine: Machine) -> None:
    pickled, gguf = files(), files(**{"tiny-q4.gguf": b"GGUF" + bytes(100)})
    for there in (pickled, gguf):
        del there["model.safetensors"]
    machine.hub.add("acme/pickled", pickled)
    machine.hub.add("acme/gguf", gguf)
    assert "pickled weights only (pytorch_model.bin)" in machine.run("pull", "acme/pickled", code=2)
    assert "`orcinus pull acme/gguf --file tiny-q4.gguf`" in machine.run("pull", "acme/gguf", code=2)
    assert "has no file x.gguf; choose one of tiny-q4.gguf" in machine.run(
        "pull", "acme/gguf", "--file", "x.gguf", code=2
    )
    assert "not a GGUF file" in machine.run("pull", "acme/gguf", "--file", "pytorch_model.bin", code=2)
    assert "tiny-q4.gguf: version 0, versions 2 and 3" in machine.run("pull", "acme/gguf", "--file", "tiny-q4.gguf")
    assert "tiny-q4.gguf: version 0, versions 2 and 3" in machine.run("up", "--model", "acme/gguf", code=2)
    assert machine.hub.fetched()["pytorch_model.bin"] == 0


def test_gguf_file_is_served_by_the_name_of_its_repository_or_its_path(machine: Machine, tmp_path: Path) -> None:
    from tests.support.checkpoints.models import make_llama  # most processes of a run need no transformers

    make_llama(tmp_path / "plain", requests=1, output_tokens=1, hidden_size=256, intermediate_size=256)
    write_model(tmp_path / "plain", tmp_path / "x.gguf", lambda name: "Q6_K" if name == "output.weight" else "Q4_K")
    data = (tmp_path / "x.gguf").read_bytes()
    machine.hub.add("acme/gguf", {"README.md": b"# Tiny", "q4/tiny-q4.gguf": data, "tiny-f16.gguf": data + bytes(32)})
    said = machine.run("pull", "acme/gguf", code=2)
    assert "choose one of q4/tiny-q4.gguf, tiny-f16.gguf: `orcinus pull acme/gguf --file q4/tiny-q4.gguf`" in said
    said = machine.run("pull", "acme/gguf", "--file", "q4/tiny-q4.gguf")
    assert "serve it with `make run MODEL=acme/gguf`" in said
    with patch.object(constants, "HF_HUB_CACHE", str(machine.home / "hub")):
        settings = CommonSettings(model=Path("acme/gguf"))
    assert settings.model.name == "tiny-q4.gguf"
    assert settings.served_model_name == "acme/gguf"
    assert model_problem(settings.model, "auto") == ""
    listed = json.loads(machine.run("list", "--json"))["models"][0]
    assert (listed["name"], listed["problem"]) == ("acme/gguf", "")
    hold(settings.model)
    assert "in use" in machine.run("rm", "--yes", "acme/gguf", code=2)
    said = machine.run("pull", "acme/gguf", "--file", "tiny-f16.gguf")
    second = settings.model.parents[1] / "tiny-f16.gguf"
    assert f"serve it with `make run MODEL={second}`" in said
    assert "2 GGUF files, q4/tiny-q4.gguf, tiny-f16.gguf; give the path of one" in machine.run(
        "up", "--model", "acme/gguf", code=2
    )
    assert CommonSettings(model=second).served_model_name == "acme/gguf"
    assert CommonSettings(model=tmp_path / "x.gguf").served_model_name == "x"


def test_gguf_model_in_parts_is_fetched_and_served_by_its_first(machine: Machine, tmp_path: Path) -> None:
    from tests.support.checkpoints.models import make_llama  # most processes of a run need no transformers

    make_llama(tmp_path / "plain", requests=1, output_tokens=1, hidden_size=256, intermediate_size=256)
    write_model(tmp_path / "plain", tmp_path / "whole.gguf", lambda _: "Q3_K")
    (tmp_path / "parts").mkdir()
    parts = write_parts(tmp_path / "whole.gguf", tmp_path / "parts" / "tiny", 8)
    assert len(parts) >= 3
    data = {f"q3/{part.name}": part.read_bytes() for part in parts}
    machine.hub.add("acme/gguf", {"README.md": b"# Tiny", **data})
    first = f"q3/{parts[0].name}"
    assert f"choose one of {first}: `orcinus pull acme/gguf --file {first}`" in machine.run("pull", "acme/gguf", code=2)
    second = f"q3/{parts[1].name}"
    for file in (second, first):
        assert "serve it with `make run MODEL=acme/gguf`" in machine.run("pull", "acme/gguf", "--file", file)
    with patch.object(constants, "HF_HUB_CACHE", str(machine.home / "hub")):
        settings = CommonSettings(model=Path("acme/gguf"))
    assert (settings.model.name, settings.served_model_name) == (parts[0].name, "acme/gguf")
    assert {path.name for path in settings.model.parent.iterdir()} == {part.name for part in parts}
    assert model_problem(settings.model, "auto") == ""
    assert read_model(settings.model).tensors == read_model(tmp_path / "whole.gguf").tensors
    assert CommonSettings(model=parts[0]).served_model_name == "tiny"
    later = settings.model.with_name(parts[1].name)
    assert f"part 2 of {len(parts)}; give the first one, {parts[0].name}" in model_problem(later, "auto")
    later.unlink()
    assert f"{later}: part 2 of {len(parts)} is missing" in machine.run("up", "--model", str(settings.model), code=2)
    machine.hub.add("acme/torn", {"README.md": b"# Tiny", **{name: data[name] for name in list(data)[:-1]}})
    said = machine.run("pull", "acme/torn", "--file", first, code=2)
    assert f"has no file q3/{parts[-1].name}; choose another repository" in said
    assert f"has {first}, and not all parts of that model; choose another" in machine.run("pull", "acme/torn", code=2)
    settings.model.unlink()
    (third,) = settings.model.parent.glob("*-00003-of-*")
    assert f"part 3 of {len(parts)}; fetch all parts into one directory and give" in model_problem(third, "auto")


def test_pull_waits_after_429_until_it_gives_up(machine: Machine) -> None:
    machine.hub.trouble.too_many = 2
    assert "the Hub answers 429 for its files; trying again in 0 s" in machine.run("pull", NAME)
    machine.hub.trouble.too_many = 99
    assert "refuses more requests for now (429)" in machine.run("pull", f"{NAME}@main", code=2)


def test_second_pull_fetches_no_content_and_offline_asks_nothing(machine: Machine) -> None:
    assert "HF_HUB_OFFLINE forbids" in machine.run("pull", NAME, code=2, HF_HUB_OFFLINE=True)
    machine.run("pull", NAME)
    machine.hub.seen.clear()
    assert "0 bytes of them fetched now" in machine.run("pull", NAME)
    assert machine.hub.seen and not machine.hub.fetched()
    machine.hub.seen.clear()
    assert "0 bytes of them fetched now" in machine.run("pull", NAME, HF_HUB_OFFLINE=True)
    assert not machine.hub.seen
    assert "what is on this machine stays in use" in machine.run("pull", NAME, ENDPOINT="http://127.0.0.1:9")


def test_unreachable_hub_is_named(machine: Machine) -> None:
    said = machine.run("pull", NAME, code=2, ENDPOINT="http://127.0.0.1:9")
    assert "the Hub at http://127.0.0.1:9 cannot be reached" in said


def test_up_refuses_before_the_weights_are_fetched(machine: Machine) -> None:
    there = files(**{"config.json": b'{"architectures": ["MambaForCausalLM"]}'})
    machine.hub.add("acme/mamba", there)
    problem = "architecture 'MambaForCausalLM' is not supported"
    assert problem in machine.run("up", "--model", "acme/mamba", code=2)
    assert machine.hub.fetched()["model.safetensors"] == 0
    assert machine.run("pull", "acme/mamba").count(problem) == 1
    listed = machine.run("list")
    assert "cannot be served" in listed and f"acme/mamba: config.json: {problem}" in listed
    assert "neither a directory here nor a model at" in machine.run("up", "--model", "no/such", code=2)
    machine.hub.seen.clear()
    for service in ("gateway", "worker"):
        said = machine.run(service, "--model", "acme/other", code=2)
        assert "fetch it with `orcinus pull acme/other`" in said
    assert not machine.hub.seen  # services never fetch


def test_list_shows_a_model_until_rm_is_confirmed_and_removes_all_files(pulled: Machine) -> None:
    (row,) = json.loads(pulled.run("list", "--json"))["models"]
    assert (row["name"], row["refs"], row["origin"], row["problem"]) == (NAME, ["main"], "orcinus", "")
    assert row["bytes"] > WEIGHTS_BYTES and "can be served" in pulled.run("list")
    assert "nothing was removed" in pulled.run("rm", NAME, code=1, typed="n\n")
    assert pulled.snapshot().is_dir()
    assert "removed 3 files" in pulled.run("rm", NAME, typed="y\n")
    assert not pulled.directory.exists() and "no models in" in pulled.run("list")
    assert "no such model on this machine" in pulled.run("rm", NAME, code=2, typed="y\n")


def test_rm_refuses_a_model_that_is_served(pulled: Machine) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom services.hub.store import hold\n"
        "hold(Path(sys.argv[1]))\nprint('held', flush=True)\nsys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(pulled.snapshot())]
    serving = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert serving.stdin and serving.stdout and serving.stdout.readline() == "held\n"
    assert "in use by a process that serves it" in pulled.run("rm", "--yes", NAME, code=2)
    assert "in use" in pulled.run("list")
    serving.communicate()
    pulled.run("rm", "--yes", NAME)


def test_rm_keeps_files_that_another_tool_fetched(machine: Machine) -> None:
    program = (
        "import sys\nfrom huggingface_hub import snapshot_download\n"
        "snapshot_download('acme/tiny', allow_patterns=['model.safetensors', 'README.md'])\n"
    )
    env = clean_env(HF_HOME=str(machine.home), HF_ENDPOINT=machine.hub.url, HF_HUB_DISABLE_XET="1")
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=env, timeout=120, check=True)
    assert json.loads(machine.run("list", "--json"))["models"][0]["origin"] == "another tool"
    assert "nothing of it was fetched by orcinus" in machine.run("rm", "--yes", NAME, code=2)
    machine.run("pull", NAME)
    said = machine.run("rm", "--yes", NAME)
    assert "kept: 2 files (3.0 MiB) fetched by another tool" in said and "removed 2 files" in said
    assert {path.name for path in machine.snapshot().iterdir()} == {"model.safetensors", "README.md"}
    assert (machine.snapshot() / "model.safetensors").read_bytes() == weights()
    assert "also those that another tool fetched" in machine.run("rm", "--yes", "--others", NAME)
    assert not machine.directory.exists()


def test_unbounded_tokenizer_is_refused_before_the_weights(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    step = {"type": "Prepend", "prepend": "x" * 5000}
    machine.hub.add("acme/grows", files(**{"tokenizer.json": json.dumps({"normalizer": step}).encode()}))
    assert "one byte of text can become 5001, at most 4096" in machine.run("pull", "acme/grows", code=2)
    monkeypatch.setattr("services.hub.fetch.MAX_FILE_BYTES", 1)
    assert "tokenizer.json has 2 bytes, at most 1; choose another" in machine.run("pull", NAME, code=2)
    assert not [seen for seen in machine.hub.seen if "model.safetensors" in seen.path]


def test_second_pull_is_refused_while_one_runs(machine: Machine) -> None:
    lock = machine.home / "hub" / ".locks" / "models--acme--tiny" / "orcinus-pull.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "another process fetches it" in machine.run("pull", NAME, code=2)
