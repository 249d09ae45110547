"""The demo model's text: which files, which of them are held out, the tokenizer, and chat turns made from functions.

Called by train.py. The split depends on the sorted paths alone: every 50th file is held out.
"""

import ast
import gzip
import json
import random
import textwrap
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

HOLD_OUT_EVERY = 50
SPECIAL_TOKENS = ["<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
# A line break takes the indentation after it, a word takes the one blank before it.
WORDS = r"\s*[\r\n]+[ \t]*| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SYSTEM_PROMPT = "You are a Python assistant."
CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role'] + ': use system, user or assistant') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def read_corpus(root: Path) -> list[tuple[str, str]]:
    """(path under root, text) of every UTF-8 .py, .rst and .txt file, sorted by path.

    Installed packages are left out, and so is _sysconfigdata, which names folders of the machine that built Python.
    """
    files = []
    for path in sorted(root.rglob("*"), key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root).as_posix()
        skipped = "site-packages/" in name or "dist-packages/" in name or path.name.startswith("_sysconfigdata")
        if skipped or path.suffix not in {".py", ".rst", ".txt"} or not path.is_file():
            continue
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError:
            continue
        if text:
            files.append((name, text))
    if not files:
        raise SystemExit(f"no .py, .rst or .txt file under {root}: give another --corpus-root")
    return files


def split_corpus(files: list[tuple[str, str]]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(training files, held-out files)"""
    held_out = files[HOLD_OUT_EVERY - 1 :: HOLD_OUT_EVERY]
    kept = set(range(len(files))) - set(range(HOLD_OUT_EVERY - 1, len(files), HOLD_OUT_EVERY))
    return [files[i] for i in sorted(kept)], held_out


def write_held_out(files: list[tuple[str, str]], path: Path) -> None:
    lines = "".join(json.dumps({"path": name, "text": text}) + "\n" for name, text in files)
    path.write_bytes(gzip.compress(lines.encode(), compresslevel=9, mtime=0))


def read_held_out(path: Path) -> list[tuple[str, str]]:
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]
    return [(row["path"], row["text"]) for row in rows]


def train_tokenizer(texts: list[str], vocab_size: int, out: Path) -> None:
    """Write tokenizer.json (byte-level BPE) and tokenizer_config.json with the chat template to `out`."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "additional_special_tokens": SPECIAL_TOKENS[3:],
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def turns(texts: list[str], budget: int, seed: int) -> list[list[dict[str, str]]]:
    """Conversations of about `budget` characters: a function's docstring asked for, its source answered."""
    rng = random.Random(seed)
    conversations: list[list[dict[str, str]]] = []
    for text in rng.sample(texts, len(texts)):
        for question, answer in questions(text):
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            if rng.random() < 0.3:
                messages.insert(0, {"role": "system", "content": SYSTEM_PROMPT})
            conversations.append(messages)
            budget -= len(question) + len(answer)
        if budget < 0:
            break
    return conversations


def questions(text: str) -> list[tuple[str, str]]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    pairs: list[tuple[str, str]] = []
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not (doc := ast.get_docstring(node)):
            continue
        first = doc.split("\n\n")[0].replace("\n", " ")
        source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        if not 40 <= len(source) <= 1200 or len(first) > 300:
            continue
        if len(pairs) % 2:
            pairs.append((f"What does {node.name} do?", doc))
        else:
            pairs.append((f"Write {node.name}: {first}", source))
    return pairs
