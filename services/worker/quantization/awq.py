"""AWQ (arXiv 2306.00978), the layout `gemm` of AutoAWQ: `qweight` [inputs, outputs / 8], `qzeros`, `scales`.

weight = (q - zero) * scale. A word of 32 bits holds 8 outputs, from its lowest bits on those of ORDER.
Source: awq/utils/packing_utils.py of https://github.com/casper-hansen/AutoAWQ.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.ops import Groups
from services.worker.checkpoint.source import Source, finite
from services.worker.quantization.base import Matrix
from services.worker.quantization.stored import StoredMethod, read_whole, row_steps, unpacked
from shared.errors import ModelError

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Awq(StoredMethod):
    def check_stored(self, source: Source, matrix: Matrix) -> None:
        name, outputs, inputs = matrix.name, matrix.outputs, matrix.inputs
        if outputs % 8:
            raise ModelError(f"{source.model}: {name} has {outputs} outputs, AWQ packs multiples of 8; fetch it again")
        source.check(f"{name}.qweight", (inputs, outputs // 8), ("I32",))
        source.check(f"{name}.qzeros", (self.groups(inputs), outputs // 8), ("I32",))
        source.check(f"{name}.scales", (self.groups(inputs), outputs), self.scales())

    def read_stored(self, source: Source, matrix: Matrix, dtype: torch.dtype) -> Iterator[Tensor | Groups]:
        name, inputs, columns = matrix.name, matrix.inputs, matrix.columns
        groups, words = self.groups(inputs), matrix.outputs // 8
        # Words of these rows, copied: parts of one matrix are held side by side.
        held = slice(matrix.rows.start // 8, -(-matrix.rows.stop // 8))
        scales = read_whole(source, f"{name}.scales", (groups, matrix.outputs))[:, 8 * held.start : 8 * held.stop]
        scales = finite(source, f"{name}.scales", scales.float().t(), self.largest)
        zeros = _in_order(read_whole(source, f"{name}.qzeros", (groups, words))[:, held]).t().float()
        stored = source.read(f"{name}.qweight", (inputs, words), columns.start, len(columns))[:, held].contiguous()
        for rows in row_steps(matrix.rows, inputs):
            some = slice(rows.start - 8 * held.start, rows.stop - 8 * held.start)
            first = some.start // 8
            numbers = _in_order(stored[:, first : -(-some.stop // 8)]).t()[some.start - 8 * first :][: len(rows)]
            yield self.piece(numbers, scales[some], zeros[some], columns, dtype)


def _in_order(words: Tensor) -> Tensor:
    """Return [rows, words] as [rows, 8 * words] uint8."""
    places = torch.tensor(ORDER).argsort()
    return unpacked(words, 4).view(words.shape[0], -1, 8)[:, :, places].flatten(1)
