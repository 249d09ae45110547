"""The demo model in assets/demo-model: its training script, its figure, its tokenizer and its chat template."""

import ast
import contextlib
import gzip
import json
import random
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from services.launcher.up import DEMO_PROMPT

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[3]
DEMO_MODEL = ROOT / "assets" / "demo-model"
GOAL_BITS_PER_BYTE = 1.5
BITS_PER_BYTE_OF_A_PART = 1.2707
"""Of each twelfth held-out file. Other weights, another tokenizer or other files give another figure."""


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(DEMO_MODEL)


def figure_of_card() -> float:
    figure = re.search(r"\*\*(\d\.\d+) bits per byte\*\*", (DEMO_MODEL / "README.md").read_text())
    assert figure, "the card states no figure"
    return float(figure[1])


def run_script(*arguments: str | Path) -> str:
    command = [sys.executable, str(DEMO_MODEL / "train.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_training_script_runs_twenty_steps(tmp_path: Path) -> None:
    corpus, out = tmp_path / "corpus", tmp_path / "model"
    corpus.mkdir()
    names = sorted(path.name for path in Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))[:150]
    for name in names:
        shutil.copy(Path(sysconfig.get_path("stdlib")) / name, corpus)

    sizes = ["--steps", "20", "--batch", "2", "--context", "64", "--vocab-size", "1024"]
    summary = json.loads(run_script("--corpus-root", corpus, "--out", out, *sizes))

    assert summary["steps"] == 20
    assert summary["tokens_seen"] == 20 * 2 * 64
    assert summary["curve"][-1]["loss"] < summary["curve"][0]["loss"] - 0.5
    held_out = gzip.decompress((out / "heldout.jsonl.gz").read_bytes()).decode().splitlines()
    assert [json.loads(line)["path"] for line in held_out] == names[49::50]
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert model.generate(torch.tensor([[0, 65, 66]]), max_new_tokens=4, do_sample=False).shape[1] >= 4
    assert len(transformers.AutoTokenizer.from_pretrained(out)) == model.config.vocab_size == 1024


def test_committed_model_has_its_figure_on_a_part_of_the_held_out_files(tmp_path: Path) -> None:
    assert figure_of_card() <= GOAL_BITS_PER_BYTE
    lines = gzip.decompress((DEMO_MODEL / "heldout.jsonl.gz").read_bytes()).splitlines(keepends=True)
    part = tmp_path / "part.jsonl.gz"
    part.write_bytes(gzip.compress(b"".join(lines[::12])))
    result = json.loads(run_script("--evaluate", "--json", "--heldout", part))
    assert result["bits_per_byte"] == pytest.approx(BITS_PER_BYTE_OF_A_PART, abs=0.001)


@pytest.mark.slow
def test_committed_model_reaches_its_figure() -> None:
    result = json.loads(run_script("--evaluate", "--json"))
    assert result["bits_per_byte"] <= GOAL_BITS_PER_BYTE
    assert result["bits_per_byte"] == pytest.approx(figure_of_card(), abs=0.01)


def test_committed_model_is_a_small_bfloat16_llama() -> None:
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["dtype"], config["rope_theta"]) == ("bfloat16", 10000.0)
    assert sum(path.stat().st_size for path in DEMO_MODEL.iterdir() if path.is_file()) <= 15_000_000


def test_tokenizer_round_trips_any_text(tokenizer) -> None:
    rng = random.Random(7)
    blanks = " \t\r\n\u00a0\u2028\u3000"
    texts = [
        "",
        " ",
        "\n\n  x  \n",
        "  two  blanks  ",
        "\r\n\t if x:\r\n\t\tpass\r\n",
        "\x00\x7f",
        "\ud7ff\ue000\U0010ffff",
    ]
    texts += [
        "naïve façade",
        "日本語 한국어 ไทย",
        "👩🏽‍🚀🇯🇵",
        "e\u0301 \u0065\u0301",
        "don't can't 12345 0x1f_ff",
        "<|end|> as text",
    ]
    for _ in range(300):
        points = [rng.randrange(0x110000) for _ in range(rng.randrange(40))]
        letters = [chr(point) for point in points if not 0xD800 <= point <= 0xDFFF]
        texts.append("".join(rng.choice([letter, rng.choice(blanks), chr(rng.randrange(128))]) for letter in letters))
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_have_their_fixed_ids(tokenizer) -> None:
    assert len(tokenizer) == 4096
    assert tokenizer.convert_ids_to_tokens(range(7)) == [
        *("<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
    ]
    assert {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id} == {0, 1, 2}
    assert 6 in transformers.GenerationConfig.from_pretrained(DEMO_MODEL).eos_token_id


def test_chat_template_marks_roles_and_invites_the_assistant(tokenizer) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
    ]
    said = "<|bos|><|system|>\nBe brief.<|end|>\n<|user|>\nHello<|end|>\n<|assistant|>\nHi<|end|>\n"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == said
    invited = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert invited == said.removesuffix("Hi<|end|>\n")
    ids = tokenizer.encode(invited)
    assert [i for i in ids if i < 7] == [0, 3, 6, 4, 6, 5]


def test_chat_template_refuses_an_unknown_role(tokenizer) -> None:
    with pytest.raises(Exception, match="unknown role tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def demo_prompt(tokenizer):
    message = {"role": "user", "content": DEMO_PROMPT}
    return tokenizer.apply_chat_template([message], add_generation_prompt=True, return_tensors="pt", return_dict=True)


def test_demo_prompt_is_answered_with_a_function(tokenizer) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    prompt = demo_prompt(tokenizer)
    output = model.generate(**prompt, max_new_tokens=64, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    (function,) = ast.parse(tokenizer.decode(output, skip_special_tokens=True)).body
    assert isinstance(function, ast.FunctionDef) and ast.get_docstring(function)
    assert all(DEMO_PROMPT in (ROOT / page).read_text() for page in ("README.md", "docs/quickstart.md"))


def test_demo_prompt_is_answered_with_functions_by_default(tokenizer) -> None:
    model, prompt = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL), demo_prompt(tokenizer)
    torch.manual_seed(1)
    answers = model.generate(**prompt, max_new_tokens=200, num_return_sequences=20)[:, prompt["input_ids"].shape[1] :]
    ended = [answer for answer in answers.tolist() if {1, 6} & set(answer)]
    functions = []
    for answer in ended:
        with contextlib.suppress(SyntaxError):
            functions += ast.parse(tokenizer.decode(answer, skip_special_tokens=True)).body
    assert sum(isinstance(function, ast.FunctionDef) for function in functions) >= 19
