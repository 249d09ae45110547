"""Adapters at real gateways: what is loaded, what is refused, what a name stands for, and until when."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from services.gateway.adapters import FORMER_S, AdapterNames, AdapterRecord
from services.gateway.errors import ApiError
from shared.dead_letters import DeadLetters
from shared.models.adapters import CONFIG, STORE, WEIGHTS, digest_of
from shared.settings import GatewaySettings
from shared.tasks import end
from tests.integration.conftest import add_key
from tests.support.checkpoints.gguf import write_file
from tests.support.checkpoints.tokenizers import write_model
from tests.support.gateway.process import GatewayProcess, running_gateway
from tests.support.launcher import clean_env
from tests.support.stack import ROOT, RedisServer
from tests.support.stand_ins.scripted_scheduler import LENGTH, Line, ScriptedScheduler
from tests.support.waiting import until, wait_until

HIDDEN = 8
CONFIGURED = "sk-of-the-settings"


PROJECTION = "model.layers.0.self_attn.q_proj"


def write(
    folder: Path, rank: int = 2, inputs: int = HIDDEN, fill: float = 1.0, module: str = PROJECTION, **config: Any
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"base_model.model.{module}.lora_A.weight": np.full((rank, inputs), fill, np.float32),
        f"base_model.model.{module}.lora_B.weight": np.ones((6, rank), np.float32),
    }
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 4, "r": rank} | config))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def gateways(
    tmp_path_factory: pytest.TempPathFactory, folder: Path, redis_server: RedisServer
) -> Iterator[list[GatewayProcess]]:
    """Two of one model, and one without --adapter-dir."""
    model = write_model(tmp_path_factory.mktemp("models") / "tiny")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"hidden_size": HIDDEN, "num_hidden_layers": 2}))
    with contextlib.ExitStack() as stack:
        made = [
            stack.enter_context(
                running_gateway(tmp_path_factory.mktemp("gateway"), model, redis_server, api_key=CONFIGURED, **more)
            )
            for more in ({"adapter_dir": folder}, {"adapter_dir": folder}, {})
        ]
        for each in made:
            each.key = CONFIGURED
        yield made


@pytest.fixture(scope="module")
def scheduler(gateways: list[GatewayProcess], redis_server: RedisServer) -> ScriptedScheduler:
    leading = ScriptedScheduler(redis_server.client, gateways[0].keys).lead()
    for gateway in gateways:
        gateway.wait_ready()
    return leading


def load(gateway: GatewayProcess, name: str, path: str | Path, key: str | None = None, **more: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path), **more}
    return gateway.request("POST", "/v1/load_lora_adapter", json=body, key=key)


def unload(gateway: GatewayProcess, name: str, key: str | None = None) -> httpx.Response:
    return gateway.request("POST", "/v1/unload_lora_adapter", json={"lora_name": name}, key=key)


def names(gateway: GatewayProcess) -> list[str]:
    return [card["id"] for card in gateway.get("/v1/models").json()["data"]]


def message(answer: httpx.Response, status: int = 400) -> str:
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["message"])


def test_adapter_is_listed_and_chosen_at_every_gateway(
    gateways: list[GatewayProcess], folder: Path, scheduler: ScriptedScheduler
) -> None:
    first, second, _ = gateways
    source = write(folder / "sql")
    digest = digest_of(source)
    answer = load(first, "sql", "sql")
    assert answer.text == "Success: LoRA adapter 'sql' added successfully."
    shutil.rmtree(source)  # the store has the files
    assert digest_of(folder / STORE / digest.hex()) == digest
    until("the other gateway knows the adapter", lambda: "sql" in names(second))
    card = second.get("/v1/models/sql").json()
    assert (card["parent"], card["root"]) == (names(second)[0], str(source))
    for model, adapter in (("sql", digest), (card["parent"], b"")):
        body = {"model": model, "prompt": "The", "max_tokens": 1, "background": True}
        assert second.post("/v1/completions", body).status_code == 202
        claimed = scheduler.claim()
        assert claimed.request.adapter == adapter
        scheduler.publish(Line(claimed.id, 0, [65], finish=LENGTH))


def test_request_keeps_the_version_that_its_name_stood_for(
    gateways: list[GatewayProcess], folder: Path, scheduler: ScriptedScheduler
) -> None:
    first, *_ = gateways
    old = digest_of(write(folder / "v1", fill=1.0))
    new = digest_of(write(folder / "v2", fill=2.0))
    assert load(first, "versions", "v1").status_code == 200
    body = {"model": "versions", "prompt": "The", "max_tokens": 1, "background": True}
    assert first.post("/v1/completions", body).status_code == 202
    assert "is loaded already; unload it first, or send load_inplace" in message(load(first, "versions", "v2"))
    assert load(first, "versions", "v2", load_inplace=True).status_code == 200
    assert first.post("/v1/completions", body).status_code == 202
    for digest in (old, new):
        claimed = scheduler.claim()
        assert claimed.request.adapter == digest
        assert (folder / STORE / digest.hex() / WEIGHTS).is_file()
        scheduler.publish(Line(claimed.id, 0, [65], finish=LENGTH))


def test_unloaded_adapter_is_unknown_at_every_gateway(gateways: list[GatewayProcess], folder: Path) -> None:
    first, second, _ = gateways
    write(folder / "gone")
    assert load(first, "gone", "gone").status_code == 200
    until("the other gateway knows the adapter", lambda: "gone" in names(second))
    answer = unload(second, "gone")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'gone' removed successfully.")
    assert "no adapter 'gone' is loaded" in message(unload(second, "gone"), 404)
    until("the first gateway has forgotten the adapter", lambda: "gone" not in names(first))
    body = {"model": "gone", "prompt": "The"}
    assert "The model 'gone' does not exist" in message(first.post("/v1/completions", body), 404)


def test_request_of_an_unloaded_adapter_is_found_by_its_idempotency_key(
    gateways: list[GatewayProcess], folder: Path, scheduler: ScriptedScheduler
) -> None:
    first, second, _ = gateways
    write(folder / "once")
    assert load(first, "once", "once").status_code == 200
    until("the other gateway knows the adapter", lambda: "once" in names(second))
    body = {"model": "once", "prompt": "The", "max_tokens": 1, "background": True}
    key = {"idempotency-key": "k"}
    begun = first.request("POST", "/v1/completions", json=body, headers=key)
    assert begun.status_code == 202
    assert unload(first, "once").status_code == 200
    claimed = scheduler.claim()
    scheduler.publish(Line(claimed.id, 0, [65], finish=LENGTH))
    until("the other gateway has forgotten the adapter", lambda: "once" not in names(second))
    for gateway in (first, second):
        again = gateway.request("POST", "/v1/completions", json=body, headers=key)
        assert (again.status_code, again.json()["id"]) == (202, claimed.id)
        other = gateway.request("POST", "/v1/completions", json=body, headers={"idempotency-key": "another"})
        assert "The model 'once' does not exist" in message(other, 404)
    assert load(first, "once", "once").status_code == 200
    assert first.post("/v1/completions", body).status_code == 202
    claimed = scheduler.claim()
    scheduler.publish(Line(claimed.id, 0, [65], finish=LENGTH))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rank": 65}, "has rank 65, at most 64 is served; raise --max-lora-rank"),
    ({"inputs": 9}, "is [6, 9], the served model has hidden size 8; the adapter is of another base"),
    (
        {"module": "model.layers.2.self_attn.q_proj"},
        "layers.2.self_attn.q_proj: the served model has 2 layers; the adapter is of another base",
    ),
    ({"module": "lm_head"}, "lm_head: adapters of embeddings and of the head cannot be served"),
    ({"module": "model.layers.0.mlp.experts.1.up_proj"}, "adapters of single experts cannot be served"),
    ({"use_dora": True}, "use_dora is true; DoRA cannot be served"),
    ({"modules_to_save": ["lm_head"]}, "whole matrices beside the adapter cannot be served"),
    ({"bias": "all"}, 'bias is "all"; biases of the base cannot be changed'),
    ({"peft_type": "IA3"}, 'peft_type is "IA3"; LORA is served'),
    ({"init_lora_weights": "pissa"}, "it changes the base"),
    ({"lora_alpha": "much"}, 'lora_alpha is "much"; a number from 0'),
]


@pytest.mark.parametrize(("fields", "why"), REFUSED)
def test_adapter_that_cannot_be_served_is_refused_by_name(
    gateways: list[GatewayProcess], tmp_path: Path, folder: Path, fields: dict[str, Any], why: str
) -> None:
    write(folder / "bad", **fields)
    assert why in message(load(gateways[0], "bad", "bad"))
    assert "bad" not in names(gateways[0])
    assert not list((folder / STORE).glob("new-*"))


def test_path_outside_the_folder_is_refused(gateways: list[GatewayProcess], folder: Path, tmp_path: Path) -> None:
    outside = write(tmp_path / "outside")
    (folder / "link").symlink_to(outside)
    (folder / "half").mkdir()
    for name in (CONFIG, WEIGHTS):
        (folder / "half" / name).symlink_to(outside / name)
    for path in (outside, "link", "half", "..", ".", f"../{tmp_path.name}/outside"):
        assert "--adapter-dir" in message(load(gateways[0], "out", path))
    store = folder / STORE
    store.mkdir(exist_ok=True)
    assert "is not below --adapter-dir" in message(load(gateways[0], "out", write(store / "mine")))
    shutil.rmtree(store / "mine")
    assert "is not there" in message(load(gateways[0], "out", "nowhere\0"))


async def test_folder_that_becomes_a_link_meanwhile_is_refused(
    adapters: AdapterNames, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside, inside = write(tmp_path / "outside", fill=3.0), write(folder / "deep" / "inside")
    resolve = Path.resolve

    def later(path: Path, strict: bool = False) -> Path:
        real = resolve(path, strict)
        if path.name == CONFIG and not inside.is_symlink():
            inside.rename(folder / "deep" / "moved")
            inside.symlink_to(outside)
        return real

    monkeypatch.setattr(Path, "resolve", later)
    with pytest.raises(ApiError, match=r"cannot be opened .*; copy the adapter there again") as refused:
        await adapters.load("swapped", "deep/inside", False)
    assert (refused.value.status, adapters.records) == (400, {})


async def test_encoder_takes_no_adapter(adapters: AdapterNames, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "own" / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))
    write(folder / "encoder")
    with pytest.raises(ApiError, match="the served model is an encoder, which takes no adapters; name another one"):
        await adapters.load("encoder", "encoder", False)
    assert not adapters.records


async def test_modules_and_shapes_are_compared_with_the_weights(
    adapters: AdapterNames, folder: Path, tmp_path: Path
) -> None:
    name = "language_model.layers.0.self_attn.q_proj"  # other checkpoints begin otherwise
    base = tmp_path / "own" / "model.safetensors"
    write(folder / "shaped")  # [6, 8]

    async def loaded(tensors: Mapping[str, tuple[int, ...]]) -> str:
        save_file({key: np.zeros(shape, np.float32) for key, shape in tensors.items()}, base)
        try:
            await adapters.load("shaped", "shaped", False)
        except ApiError as error:
            return error.message
        return ""

    assert "is [6, 8], the served model has [7, 8]; the adapter is of another base" in await loaded(
        {f"{name}.weight": (7, 8)}
    )
    assert "q_proj: the served model has no such module" in await loaded({f"{name[:-6]}k_proj.weight": (6, 8)})
    tower = "vision_tower.layers.0.self_attn.q_proj.weight"
    for fine in (
        {f"{name}.weight": (6, 8)}, {f"{name}.weight": (8, 6)}, {f"{name}.qweight": (1, 6)},
        {f"{name}.weight": (6, 8), tower: (5, 5)},
    ):  # fmt: skip
        assert await loaded(fine) == ""
    index = base.with_suffix(".safetensors.index.json")
    blob = tmp_path / "blob"  # as the Hub's cache has it
    blob.write_text(json.dumps({"weight_map": {"x": base.name}}))
    index.symlink_to(blob)
    assert "the served model has [7, 8]" in await loaded({f"{name}.weight": (7, 8)})
    index.unlink()
    base.write_bytes(b"cut off")
    await adapters.load("shaped", "shaped", False)


SNAPSHOT = "models--Org--Base/snapshots/c0ffee"


@pytest.mark.parametrize(
    ("model", "quantized", "base", "refused"),
    [
        (SNAPSHOT, False, "Org/Base-Instruct", True),
        (SNAPSHOT, False, "/root/.cache/huggingface/hub/models--Org--Other/snapshots/0ddba11", True),
        (SNAPSHOT, False, "/root/.cache/huggingface/hub/models--Org--Base/snapshots/0ddba11", False),
        (SNAPSHOT, False, "org/base", False),
        (SNAPSHOT, False, "/data/other", False),
        (SNAPSHOT, False, None, False),
        (SNAPSHOT, True, "Org/Other", False),
        ("base", False, "Org/Other", False),
    ],
)
async def test_adapter_of_another_repository_of_the_hub_is_refused(
    settings: GatewaySettings, folder: Path, tmp_path: Path, model: str, quantized: bool, base: object, refused: bool
) -> None:
    path = write_model(tmp_path / model)
    if quantized:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    write(folder / "based", base_model_name_or_path=base)
    adapters = AdapterNames(settings.model_copy(update={"model": path}))
    expected = pytest.raises(ApiError, match=r"base_model_name_or_path is Org/.*, the served model is Org/Base; load")
    try:
        with expected if refused else contextlib.nullcontext():
            await adapters.load("based", "based", False)
    finally:
        await adapters.close()
    assert ("based" in adapters.records) is not refused


async def test_base_of_a_gguf_model_is_not_compared(settings: GatewaySettings, folder: Path, tmp_path: Path) -> None:
    """Its repository has the name of the one that converted it."""
    path = tmp_path / "models--bartowski--Llama-3.2-1B-Instruct-GGUF" / "snapshots" / "abc" / "x.gguf"
    path.parent.mkdir(parents=True)
    sizes = {"context_length": 64, "embedding_length": HIDDEN, "block_count": 2, "feed_forward_length": 16}
    header: dict[str, Any] = {f"llama.{key}": value for key, value in {**sizes, "attention.head_count": 1}.items()}
    header |= {"general.architecture": "llama", "llama.attention.layer_norm_rms_epsilon": 1e-5}
    header |= {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.eos_token_id": 1}
    write_file(path, header, {"token_embd.weight": ("F32", (4, HIDDEN), bytes(4 * HIDDEN * 4))})
    write(folder / "converted", base_model_name_or_path="meta-llama/Llama-3.2-1B-Instruct")
    write(folder / "wide", inputs=2 * HIDDEN)
    adapters = AdapterNames(settings.model_copy(update={"model": path}))
    try:
        await adapters.load("converted", "converted", False)
        with pytest.raises(ApiError, match=f"the served model has hidden size {HIDDEN}"):
            await adapters.load("wide", "wide", False)
    finally:
        await adapters.close()
    assert list(adapters.records) == ["converted"]


def test_name_with_other_characters_is_refused(gateways: list[GatewayProcess], folder: Path) -> None:
    write(folder / "fine")
    assert "lora_name" in message(load(gateways[0], "two words", "fine"))


def test_gateway_without_the_setting_has_no_adapters(gateways: list[GatewayProcess]) -> None:
    why = "adapters are off; start gateways and workers with --adapter-dir"
    assert message(load(gateways[2], "sql", "sql"), 404) == why


def test_only_admin_keys_for_the_model_load_adapters(
    gateways: list[GatewayProcess], redis_server: RedisServer, folder: Path
) -> None:
    first = gateways[0]
    write(folder / "scoped")
    bounds = {"": "", "ops": "", "of another": "other", "of this": f"other,{first.name}", "admin": ""}
    keys = {
        kind: add_key(redis_server, first.keys, scope="admin" if models else kind, models=models)
        for kind, models in bounds.items()
    }
    until("the gateway knows the last key", lambda: first.get("/v1/models", key=keys["admin"]).status_code == 200)
    for scope in ("", "ops"):
        answer = load(first, "scoped", "scoped", key=keys[scope])
        assert "lacks the scope admin" in message(answer, 403)
    assert load(first, "scoped", "scoped", key=keys["admin"]).status_code == 200
    for answer in (
        load(first, "scoped", "scoped", key=keys["of another"], load_inplace=True),
        unload(first, "scoped", key=keys["of another"]),
    ):
        assert f"model: this key is for other; got {first.name!r}" in message(answer, 403)
    assert "scoped" in names(first)
    assert unload(first, "scoped", key=keys["of this"]).status_code == 200
    assert load(first, "scoped", "scoped", key=keys["of this"]).status_code == 200


def orcinus(gateway: GatewayProcess, *words: str, key: str = CONFIGURED) -> tuple[int, str]:
    """Return the exit code of `orcinus adapters` and what it printed."""
    command = [sys.executable, "-m", "services.cli", "adapters", *words, "--url", gateway.url]
    done = subprocess.run(
        command, cwd=ROOT, env=clean_env(ORCINUS_API_KEY=key), capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout + done.stderr


def test_command_loads_lists_and_unloads(gateways: list[GatewayProcess], folder: Path) -> None:
    first = gateways[0]
    source = write(folder / "typed-in")
    assert orcinus(first, "load", "typed-in", "typed-in") == (
        0, "Success: LoRA adapter 'typed-in' added successfully.\n"
    )  # fmt: skip
    code, text = orcinus(first, "list")
    assert code == 0 and f"typed-in  of {first.name}  " in text and str(source) in text
    code, text = orcinus(first, "list", "--json")
    assert "typed-in" in [card["id"] for card in json.loads(text)["adapters"]]
    code, text = orcinus(first, "unload", "typed-in", "--base", "other")
    assert code == 2 and "The model 'other' does not exist" in text
    assert orcinus(first, "unload", "typed-in", "--base", first.name)[0] == 0
    assert "typed-in" not in names(first)
    code, text = orcinus(first, "load", "typed-in", "..", key="sk-wrong")
    assert code == 2 and "set ORCINUS_API_KEY to another, or give it as --api-key" in text and "sk-wrong" not in text


@pytest.fixture
def settings(folder: Path, tmp_path: Path, redis_server: RedisServer) -> Iterator[GatewaySettings]:
    """Those of a model of its own."""
    made = GatewaySettings(model=write_model(tmp_path / "own"), redis_url=redis_server.url, adapter_dir=folder)
    yield made
    redis_server.client.delete(made.keys.adapters)


@pytest.fixture
async def adapters(settings: GatewaySettings) -> AsyncIterator[AdapterNames]:
    """Those of that model, in this process."""
    found = AdapterNames(settings)
    yield found
    await found.close()


def lose(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def cut(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1])


def replace(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_bytes(b"no folder")


@pytest.mark.parametrize("damage", [lose, cut, replace, shutil.rmtree])
async def test_loading_again_repairs_the_store(
    adapters: AdapterNames, folder: Path, damage: Callable[[Path], None]
) -> None:
    digest = digest_of(write(folder / "again", fill=7.0))
    await adapters.load("again", "again", False)
    damage(folder / STORE / digest.hex())
    await adapters.load("again", "again", False)
    assert digest_of(folder / STORE / digest.hex()) == digest
    assert not [each.name for each in (folder / STORE).iterdir() if len(each.name) != 64]


async def test_adapter_that_another_gateway_stores_meanwhile_is_loaded(
    adapters: AdapterNames, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = digest_of(write(folder / "both", fill=8.0))
    rename = Path.replace

    def later(made: Path, target: Path) -> Path:
        shutil.copytree(made, target)
        return rename(made, target)

    monkeypatch.setattr(Path, "replace", later)
    await adapters.load("both", "both", False)
    assert adapters.digest("both") == digest == digest_of(folder / STORE / digest.hex())


async def test_weights_with_a_long_header_are_refused(adapters: AdapterNames, folder: Path) -> None:
    """Python's lock is held while such a header is parsed: 94 MB of names held up the gateway for 3.5 s."""
    weights = write(folder / "wordy") / WEIGHTS
    save_file(load_file(weights), weights, {"notes": "x" * (8 << 20)})
    with pytest.raises(ApiError, match=r"its header has \d+ bytes, at most 8388608 are read; save fewer") as refused:
        await adapters.load("wordy", "wordy", False)
    assert (refused.value.status, refused.value.param) == (400, "lora_path")


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.uint8, np.bool_])
async def test_tensors_of_a_type_that_no_worker_takes_are_refused(
    adapters: AdapterNames, folder: Path, dtype: type[np.generic]
) -> None:
    weights = write(folder / "typed") / WEIGHTS
    tensors = load_file(weights)
    name = next(name for name in tensors if "lora_B" in name)
    save_file(tensors | {name: tensors[name].astype(dtype)}, weights)
    with pytest.raises(ApiError, match=rf"tensor {name} is \w+; save it as float32, bfloat16 or float16"):
        await adapters.load("typed", "typed", False)
    save_file(tensors | {name: tensors[name].astype(np.float16)}, weights)
    await adapters.load("typed", "typed", False)


async def test_full_store_takes_what_it_has_already(
    adapters: AdapterNames, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder / "old", fill=9.0)
    write(folder / "more", fill=10.0)
    await adapters.load("old", "old", False)
    monkeypatch.setattr("services.gateway.adapters.MAX_STORED", len(list((folder / STORE).iterdir())))
    await adapters.load("other name", "old", False)
    with pytest.raises(ApiError, match="folders, the maximum; remove those that no request needs"):
        await adapters.load("more", "more", False)
    assert sorted(adapters.records) == ["old", "other name"]


@pytest.fixture
async def elsewhere(settings: GatewaySettings) -> AsyncIterator[AdapterNames]:
    """The same names at another gateway."""
    found = AdapterNames(settings)
    yield found
    await found.close()


async def outcomes(*calls: Awaitable[None]) -> list[int]:
    """Return the status of each of these calls, made at a time."""
    ended = await asyncio.gather(*calls, return_exceptions=True)
    return sorted(each.status if isinstance(each, ApiError) else 200 for each in ended)


async def test_two_gateways_load_and_unload_a_name_one_after_the_other(
    adapters: AdapterNames, elsewhere: AdapterNames, folder: Path
) -> None:
    for version in (1, 2):
        write(folder / f"twice{version}", fill=20.0 + version)
    loads = adapters.load("twice", "twice1", False), elsewhere.load("twice", "twice2", False)
    assert await outcomes(*loads) == [200, 400]
    assert await outcomes(adapters.unload("twice"), elsewhere.unload("twice")) == [200, 404]


async def test_key_of_another_type_is_deleted_and_set_aside(
    adapters: AdapterNames, folder: Path, settings: GatewaySettings, redis_server: RedisServer
) -> None:
    client, key, letters = redis_server.client, settings.keys.adapters, DeadLetters()
    client.set(key, "of another type")
    await adapters.load("sql", str(write(folder / "sql").relative_to(folder)), False)
    assert client.hkeys(key) == [b"sql"]
    client.delete(key)
    client.rpush(key, "of another type")
    other = AdapterNames(settings, letters)
    looking = asyncio.create_task(other.run())
    try:
        await wait_until(lambda: other.has_looked.is_set())
        assert not client.exists(key) and not other.records
        (row,) = letters.take()
        assert (row["key"], row["text"]) == (key, "a key of type list, not hash; deleted")
    finally:
        await end(looking)
        await other.close()


@pytest.mark.parametrize("name", ["taken", "long ago"])
async def test_unload_leaves_what_another_gateway_loads_meanwhile(
    adapters: AdapterNames,
    settings: GatewaySettings,
    folder: Path,
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """It is loaded between the look and the write of the one that unloads: in place, or a name to be forgotten."""
    write(folder / "taken", fill=23.0)
    await adapters.load("taken", "taken", False)
    key = settings.keys.adapters
    old = AdapterRecord("ab" * 32, 2, "/old", 1, unloaded_s=int(time.time()) - FORMER_S - 1)
    new = AdapterRecord("cd" * 32, 2, "/new", 2)
    redis_server.client.hset(key, "long ago", old.encode())
    loads = [new.encode()]

    def later() -> float:
        if loads:
            redis_server.client.hset(key, name, loads.pop())
        return time.time()

    monkeypatch.setattr("services.gateway.adapters.time", SimpleNamespace(time=later))
    await adapters.unload("taken")
    assert not loads
    stored = {name.decode(): AdapterRecord.decode(raw) for name, raw in redis_server.client.hgetall(key).items()}
    assert stored["taken"].unloaded_s and (stored["taken"].digest == new.digest) == (name == "taken")
    assert stored.get("long ago") == (new if name == "long ago" else None)
