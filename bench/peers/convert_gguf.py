"""Runs llama.cpp's own converter on a tokenizer it has not seen. Run as a file in the `export` environment:

    python convert_gguf.py SOURCE MODEL OUT f32|f16

The converter knows pre-tokenizers by a hash of their answers and refuses a new one; ours is GPT-2's.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main(source: str, model: str, out: str, kind: str) -> None:
    folder = Path(source) / "vendor" / "llama.cpp"
    sys.path[:0] = [str(folder), str(folder / "gguf-py")]
    from conversion import base  # type: ignore[import-not-found]  # llama.cpp's own, beside its converter

    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    sys.argv = ["convert_hf_to_gguf.py", model, "--outfile", out, "--outtype", kind]
    runpy.run_path(str(folder / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
