"""Train, save and evaluate the demo model: a four-layer Llama on the Python standard library's sources.

`train.py` alone repeats the training into --out; `train.py --evaluate` measures the files in --out against
`heldout.jsonl.gz`. The tokenizer and the weights never see a held-out file. Everything random comes from SEED.
"""

import argparse
import copy
import json
import math
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from corpus import read_corpus, read_held_out, split_corpus, train_tokenizer, turns, write_held_out
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 20240607
HERE = Path(__file__).resolve().parent
CONTEXT_TOKENS = 1024
EVAL_STRIDE_TOKENS = 512
CHAT_SHARE = 0.06


def model_config(vocab_size: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT_TOKENS,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        attention_bias=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )


class Muon(torch.optim.Optimizer):
    """Momentum with matrix updates orthogonalised by five Newton-Schulz steps (Jordan et al., 2024)."""

    def __init__(self, params: list[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(weight)
                state["momentum"].lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonal(weight.grad.lerp(state["momentum"], group["momentum"]))
                rows, columns = weight.shape
                weight.mul_(1 - group["lr"] * 0.01)
                weight.add_(update.to(weight.dtype), alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def orthogonal(gradient: torch.Tensor) -> torch.Tensor:
    """The nearest semi-orthogonal matrix, roughly: singular values land in about [0.7, 1.2]."""
    matrix = gradient.bfloat16()
    tall = matrix.shape[0] > matrix.shape[1]
    matrix = matrix.T if tall else matrix
    matrix = matrix / (matrix.norm() + 1e-7)
    for _ in range(5):
        gram = matrix @ matrix.T
        matrix = 3.4445 * matrix + (-4.7750 * gram + 2.0315 * gram @ gram) @ matrix
    return matrix.T if tall else matrix


def batches(documents: list[np.ndarray], batch: int, context: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (inputs, targets), int64 [batch, context]: documents shuffled and cut into windows anew every epoch."""
    rng = np.random.default_rng(SEED)
    while True:
        stream = np.concatenate([documents[i] for i in rng.permutation(len(documents))])
        stream = stream[rng.integers(0, context) :]
        windows = (len(stream) - 1) // context
        if windows < batch:
            raise SystemExit(f"the corpus has {len(stream)} tokens, one batch needs {batch * context}: add text")
        order = rng.permutation(windows)
        for start in range(0, windows - batch + 1, batch):
            rows = np.stack([stream[w * context : w * context + context + 1] for w in order[start : start + batch]])
            tokens = torch.from_numpy(rows.astype(np.int64))
            yield tokens[:, :-1], tokens[:, 1:]


def rate_at(progress: float, warmup: float = 0.02) -> float:
    """Learning rate as a share of its peak: linear up, then linear down to zero."""
    return min(progress / warmup, (1 - progress) / (1 - warmup))


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(SEED)
    training, held_out = split_corpus(read_corpus(args.corpus_root))
    args.out.mkdir(parents=True, exist_ok=True)
    write_held_out(held_out, args.out / "heldout.jsonl.gz")
    train_tokenizer([text for _, text in training], args.vocab_size, args.out)
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    documents = tokenize_documents(tokenizer, [text for _, text in training])
    tokens = sum(map(len, documents))
    say(f"{len(training)} training files, {tokens} tokens; {len(held_out)} held out")

    model = LlamaForCausalLM(model_config(len(tokenizer)))
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon = Muon(matrices, lr=args.matrix_lr)
    adam = torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    peaks = [(muon, args.matrix_lr), (adam, args.lr)]
    step, spent, log = 0, 0.0, []
    if args.resume:
        saved = torch.load(args.checkpoint)
        model.load_state_dict(saved["model"])
        muon.load_state_dict(saved["muon"])
        adam.load_state_dict(saved["adam"])
        step, spent, log = saved["step"], saved["spent"], saved["log"]

    replicas = [model, *(replica_of(model) for _ in range(args.threads - 1))]
    pool = workers(args.threads)
    source = batches(documents, args.batch, args.context)
    log_every = max(1, args.steps // 20)
    for _ in range(step):
        next(source)
    started, saved_at, recent = time.monotonic() - spent, time.monotonic(), []
    while (progress := max(step / args.steps, (time.monotonic() - started) / args.seconds)) < 1:
        for optimizer, peak in peaks:
            for group in optimizer.param_groups:
                group["lr"] = peak * rate_at(max(progress, 1 / args.steps))
        loss = parallel_loss(pool, replicas, *next(source))
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        for optimizer, _ in peaks:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        recent.append(loss)
        spent = time.monotonic() - started
        say_step(step, args, recent, spent)
        if step == 1 or step % log_every == 0:
            mean = float(np.mean(recent[-log_every:]))
            log.append({"step": step, "loss": round(mean, 4), "seconds": round(spent)})
            say("")
        if args.checkpoint and time.monotonic() - saved_at > 240:
            state = {"model": model.state_dict(), "muon": muon.state_dict(), "adam": adam.state_dict()}
            torch.save({**state, "step": step, "spent": spent, "log": log}, args.checkpoint)
            saved_at = time.monotonic()
    if log and log[-1]["step"] != step:
        log.append({"step": step, "loss": round(float(np.mean(recent[-log_every:])), 4), "seconds": round(spent)})
    save_model(model, args.out)
    seen = step * args.batch * args.context
    summary = {"steps": step, "tokens_seen": seen, "corpus_tokens": tokens, "seconds": round(spent), "curve": log}
    print(json.dumps(summary))


def workers(threads: int) -> ThreadPoolExecutor:
    """Threads that each compute alone: on a busy machine OpenMP's barriers would cost more than the arithmetic."""
    torch.set_num_threads(1)
    return ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))


def replica_of(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """A model of its own gradients that shares the weights."""
    replica = copy.deepcopy(model)
    for mine, shared in zip(replica.parameters(), model.parameters(), strict=True):
        mine.data = shared.data
    return replica


def parallel_loss(
    pool: ThreadPoolExecutor, replicas: list[LlamaForCausalLM], inputs: torch.Tensor, targets: torch.Tensor
) -> float:
    """Mean loss of the batch, int64 [batch, context]; leaves its gradient in the first replica's parameters."""

    def work(model: LlamaForCausalLM, rows: slice) -> float:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(inputs[rows], use_cache=False).logits
        loss = functional.cross_entropy(logits.float().flatten(0, 1), targets[rows].flatten(), reduction="sum")
        loss = loss / targets.numel()
        loss.backward()
        return loss.item()

    share = math.ceil(len(inputs) / len(replicas))
    rows = [slice(start, start + share) for start in range(0, len(inputs), share)]
    total = sum(pool.map(work, replicas, rows))
    for replica in replicas[1 : len(rows)]:
        for mine, other in zip(replicas[0].parameters(), replica.parameters(), strict=True):
            mine.grad += other.grad
            other.grad = None
    return total


def tokenize_documents(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[np.ndarray]:
    """One uint16 array per document, <|bos|> text <|eos|>, plus chat turns worth CHAT_SHARE of the text."""
    budget = int(sum(map(len, texts)) * CHAT_SHARE)
    chats = [tokenizer.apply_chat_template(turn, tokenize=False) + "<|eos|>" for turn in turns(texts, budget, SEED)]
    plain = tokenizer._tokenizer.encode_batch(texts, add_special_tokens=False)
    chatty = tokenizer._tokenizer.encode_batch(chats, add_special_tokens=False)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    documents = [np.array([bos, *encoding.ids, eos], dtype=np.uint16) for encoding in plain]
    return documents + [np.array(encoding.ids, dtype=np.uint16) for encoding in chatty]


def save_model(model: LlamaForCausalLM, out: Path) -> None:
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.generation_config.update(
        bos_token_id=0, eos_token_id=[1, 6], pad_token_id=2, do_sample=True, temperature=0.03
    )
    model.save_pretrained(out)
    settings = json.loads((out / "config.json").read_text())
    settings["rope_theta"] = settings["rope_parameters"]["rope_theta"]  # where readers older than transformers 5 look
    (out / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def say_step(step: int, args: argparse.Namespace, recent: list[float], spent: float) -> None:
    rate = step * args.batch * args.context / spent
    line = f"\rstep {step}/{args.steps} loss {np.mean(recent[-50:]):.3f} {rate:,.0f} tokens/s {spent:.0f} s "
    print(line, end="", file=sys.stderr, flush=True)


def evaluate(folder: Path, heldout: Path, threads: int) -> dict[str, float | int]:
    """Bits per byte of the model in `folder`, in float32, over every byte of the held-out files.

    Each file is <|bos|> and its tokens. Windows of CONTEXT_TOKENS start every EVAL_STRIDE_TOKENS; a token is scored
    once, in the first window that predicts it, so that past the first window it sees 512 to 1,023 tokens before it.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    files = read_held_out(heldout)
    windows, tokens = [], 0
    for _, text in files:
        ids = torch.tensor([tokenizer.bos_token_id, *tokenizer.encode(text, add_special_tokens=False)])
        tokens += len(ids) - 1
        scored = 0
        for start in range(0, len(ids), EVAL_STRIDE_TOKENS):
            window = ids[start : start + CONTEXT_TOKENS + 1]
            windows.append((window, len(window) - 1 - (scored - start)))
            scored = start + len(window) - 1
            if scored == len(ids) - 1:
                break

    @torch.no_grad()
    def nats_of(window: torch.Tensor, fresh: int) -> float:
        logits = model(window[None, :-1], use_cache=False, logits_to_keep=fresh).logits[0]
        return functional.cross_entropy(logits, window[-fresh:], reduction="sum").item()

    nats = sum(workers(threads).map(nats_of, *zip(*windows, strict=True)))
    size = sum(len(text.encode()) for _, text in files)
    bits = nats / math.log(2)
    return {"bits_per_byte": round(bits / size, 4), "files": len(files), "bytes": size, "tokens": tokens}


@torch.no_grad()
def completions(folder: Path, heldout: Path) -> list[tuple[str, str, str]]:
    """(path, prompt, completion) for the first ten held-out files: 200 characters, then 64 greedy tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for path, text in read_held_out(heldout)[:10]:
        prompt = torch.tensor([[tokenizer.bos_token_id, *tokenizer.encode(text[:200], add_special_tokens=False)]])
        output = model.generate(prompt, max_new_tokens=64, do_sample=False, attention_mask=torch.ones_like(prompt))
        answers.append((path, text[:200], tokenizer.decode(output[0, prompt.shape[1] :])))
    return answers


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write, or to evaluate")
    parser.add_argument("--corpus-root", type=Path, default=Path(sysconfig.get_path("stdlib")), help="folder of text")
    parser.add_argument("--steps", type=int, default=5400, help="optimizer steps, the learning rate's schedule")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end the schedule by then if steps are slow")
    parser.add_argument("--batch", type=int, default=4, help="windows per step")
    parser.add_argument("--context", type=int, default=CONTEXT_TOKENS, help="tokens per window")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--lr", type=float, default=3e-3, help="peak for embeddings and norms (AdamW)")
    parser.add_argument("--matrix-lr", type=float, default=0.02, help="peak for the matrices (Muon)")
    parser.add_argument("--threads", type=int, default=2, help="of one core each")
    parser.add_argument("--checkpoint", type=Path, help="file to save the training state in every four minutes")
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint")
    parser.add_argument("--evaluate", action="store_true", help="measure --out on the held-out files, train nothing")
    parser.add_argument("--completions", action="store_true", help="print ten greedy completions, train nothing")
    parser.add_argument("--heldout", type=Path, default=HERE / "heldout.jsonl.gz", help="held-out files to measure on")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if args.evaluate:
        result = evaluate(args.out, args.heldout, args.threads)
        bits = f"{result['bits_per_byte']} bits per byte over {result['files']} files, {result['bytes']} bytes"
        print(json.dumps(result) if args.json else bits)
    elif args.completions:
        for path, prompt, completion in completions(args.out, args.heldout):
            print(json.dumps({"path": path, "prompt": prompt, "completion": completion}))
    else:
        train(args)


if __name__ == "__main__":
    main()
