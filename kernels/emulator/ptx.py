"""NVRTC's own PTX of a .cu source as C++ for the emulator: what the compiler made of it, inline assembly and operands.

Each instruction becomes one statement over registers of the PTX's types; `include/ptx_machine.h` has what they compute.
An instruction, a modifier or an operand without a rule here is an error that names the line. Definitions where hardware
may differ: docs/kernels-cuda.md.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from kernels.cpu import build as cpu_build
from kernels.cuda import loader

ARCHITECTURE = "compute_80"
"""The oldest one that is served: later ones read the same PTX."""
KEPT = 32
"""Translations in the cache; the oldest go."""
SHARED_BITS = 24
"""An address in shared memory: the number of the array from here on, the offset below."""

TYPES = {
    "pred": "bool", "f32": "float", "f64": "double",
    **{f"{kind}{bits}": f"{'' if kind == 's' else 'u'}int{bits}_t" for kind in "sub" for bits in (8, 16, 32, 64)},
}  # fmt: skip
REGISTERS = {"p": "pred", "rs": "u16", "r": "u32", "rd": "u64", "f": "f32", "fd": "f64"}
SPECIAL = {
    f"%{name}.{axis}": f"{ours}.{axis}"
    for name, ours in {"tid": "threadIdx", "ctaid": "blockIdx", "ntid": "blockDim", "nctaid": "gridDim"}.items()
    for axis in "xyz"
} | {"%laneid": "unsigned(emulator::current->lane)"}
INFIX = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^"}
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
INVERSE = {"eq": "!=", "ne": "==", "lt": ">=", "le": ">", "gt": "<=", "ge": "<"}
WHOLE_NUMBERS = {"rpi": "ceil", "rmi": "floor", "rzi": "trunc", "rni": "nearbyint"}
ATOMICS = {
    "add": "atomicAdd", "max": "atomicMax", "min": "atomicMin", "or": "atomicOr", "and": "atomicAnd",
    "inc": "atomicInc", "exch": "atomicExch", "cas": "atomicCAS",
}  # fmt: skip
WRAPPERS = ("numbers.cuh", "ptx.cuh")
"""An instruction of theirs is named by the line that calls them."""
_LOCATION = re.compile(r"\.loc\s+(\d+) (\d+) (\d+)(?:, function_name [^,]+, inlined_at (\d+) (\d+) (\d+))?")
_ROUNDED: tuple[list[str], ...] = ([], ["rn"])
MODIFIERS: dict[str, dict[str, tuple[list[str], ...]]] = {
    "f": {name: _ROUNDED for name in ("add", "sub", "mul", "fma")} | {"div": (["rn"], ["approx"])},
    **{kind: {"mul": (["lo"], ["hi"], ["wide"]), "mad": (["lo"],), "bfind": (["shiftamt"],)} for kind in "sub"},
    "p": {},
}
"""What may stand between an operation and its type, by kind of type; elsewhere nothing may."""
MATHS = {
    "ex2.approx": "exp2f", "ex2.approx.ftz": "exp2f", "rcp.approx.ftz": "reciprocal", "rcp.rn": "reciprocal",
    "rsqrt.approx": "rsqrtf", "rsqrt.approx.ftz": "rsqrtf", "sqrt.rn": "sqrtf", "lg2.approx": "log2f",
    "lg2.approx.ftz": "log2f", "abs": "fabsf",
}  # fmt: skip


class PtxError(Exception):
    """There is no rule for something in the PTX."""


def translated(source: Path) -> Path:
    """Return the C++ of a source's PTX, made now unless that was done before. Raise PtxError, CudaError."""
    made_of = b"".join(each.read_bytes() for each in (Path(__file__), source, *loader.headers()))
    digest = hashlib.sha256(made_of + loader.nvrtc_version().encode()).hexdigest()[:20]
    target = cpu_build.CACHE / "emulator" / f"{source.stem}-ptx-{digest}.cpp"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        text = _Module(loader.ptx_of(source, ARCHITECTURE), f"{source.stem}.ptx").cpp()
        loader.write_whole(target, text.encode())
        for old in sorted(target.parent.glob("*-ptx-*.cpp"), key=lambda path: path.stat().st_mtime)[:-KEPT]:
            old.unlink(missing_ok=True)
    return target


class _Module:
    """The PTX of one source."""

    def __init__(self, ptx: str, name: str) -> None:
        self._lines = [line.partition("//")[0].strip() for line in ptx.splitlines()]
        self._name = name
        self._room = "emulator::MAX_SHARED" + ("_OF_9_0" if ".target sm_90a" in self._lines else "")
        self._arrays: dict[str, int] = {}  # in shared memory, with their bytes; 0 for what a launch asks for
        for line in self._lines:
            if found := re.match(r"(\.extern )?\.shared \.align \d+ \.\w(\d+) ([\w$]+)(?:\[(\d*)\])?;", line):
                self._arrays[found[3]] = 0 if found[1] else int(found[2]) // 8 * int(found[4] or 1)
        self._files = dict(re.findall(r'^\s*\.file\s+(\d+) ".*?([^/"]+)"', ptx, re.MULTILINE))
        self._callers: dict[tuple[str, ...], tuple[str, ...]] = {}
        own = [name for name, size in self._arrays.items() if size]
        self._places = dict.fromkeys(self._arrays, 0) | {name: at + 1 for at, name in enumerate(own)}

    def cpp(self) -> str:
        parts = ['#include "ptx_machine.h"\n']
        at = 0
        while at < len(self._lines):
            if found := re.match(r"\.visible \.entry (\w+)\(", self._lines[at]):
                at, kernel = self._kernel(found[1], at + 1)
                parts.append(kernel)
            at += 1
        return "\n".join(parts)

    def _kernel(self, name: str, at: int) -> tuple[int, str]:
        """Return the line behind a kernel, and its C++."""
        params, threads = 0, 0
        while self._lines[at] != "{":
            if found := re.match(r"\.param \.align \d+ \.b8 \w+\[(\d+)\]", self._lines[at]):
                params = int(found[1])
            elif found := re.match(r"\.maxntid (\d+)", self._lines[at]):
                threads = int(found[1])
            at += 1
        own = {place: array for array, place in self._places.items() if place}
        body = [
            f"static void {name}_ptx(const void* given) {{",
            *(f"  static char key{place};" for place in own),
            "  unsigned char* const arrays[] = {emulator::block.dynamic.at"
            + "".join(f", declared(&key{place}, {self._arrays[array]})" for place, array in own.items())
            + "};",
            "  const size_t sizes[] = {emulator::block.dynamic.bytes"
            + "".join(f", {self._arrays[array]}" for array in own.values())
            + "};",
            "  const Shared shared = {arrays, sizes};",
        ]
        depth, where = 1, ""
        while depth:
            at += 1
            line = self._lines[at]
            if found := _LOCATION.match(line):
                where = self._source_line(found)
                continue
            body.append(f'#line {at + 1} "{self._name}"')
            if line in ("{", "}"):
                depth += 1 if line == "{" else -1
                body.append(line)
                continue
            for part in filter(None, map(str.strip, line.split(";"))):
                try:
                    body.append(self._statement(part, name, where))
                except (PtxError, KeyError, ValueError, IndexError) as error:
                    raise PtxError(f"{self._name}:{at + 1}: no rule for {part!r} ({error})") from error
        return at, "\n".join([*body, f"PTX_KERNEL({name}, {params}, {threads}, {self._room})\n"])

    def _source_line(self, location: re.Match[str]) -> str:
        """Return the line of the source behind a `.loc`."""
        place = location.group(1, 2, 3)
        if location[4]:
            self._callers[place] = location.group(4, 5, 6)
        while self._files[place[0]] in WRAPPERS and place in self._callers:
            place = self._callers[place]
        return f"{self._files[place[0]]}:{place[1]}"

    def _statement(self, text: str, kernel: str, where: str) -> str:
        if text.startswith("$") and text.endswith(":"):
            return f"{_label(text[:-1])}:;"
        if found := re.match(r"\.reg \.(\w+)\s+%(\w+)<(\d+)>", text):
            names = ", ".join(f"{found[2]}{number}" for number in range(int(found[3])))
            return f"{TYPES[found[1]]} {names};"
        if found := re.match(r"\.reg \.(\w+)\s+%(\w+)", text):
            return f"{TYPES[found[1]]} {found[2]};"
        if text.startswith((".shared", ".pragma")):
            return ""
        guard = ""
        if found := re.match(r"@(!?)%(\w+)\s+(.*)", text):
            guard, text = f"if ({found[1]}{found[2]}) ", found[3]
        operation, _, rest = text.partition(" ") if " " in text else text.partition("\t")
        operands = [each.strip() for each in re.split(r",(?![^{]*})", rest.strip())] if rest.strip() else []
        return f"{guard}{{ {_Instruction(operation.strip(), operands, kernel, self._places, where).cpp()} }}"


class _Instruction:
    """One instruction without its guard. places: of arrays in shared memory; where: line of the source."""

    def __init__(self, operation: str, operands: list[str], kernel: str, places: dict[str, int], where: str) -> None:
        self._operation, self._given = operation, operands
        self._kernel, self._places, self._where = kernel, places, where
        self._parts = operation.split(".")
        self._type = next((part for part in reversed(self._parts) if part in TYPES), "u32")

    def cpp(self) -> str:
        name = self._parts[0]
        rules: dict[str, Callable[[], str]] = {
            "ld": self._load, "st": self._store, "mov": self._move, "cvta": self._move, "cvt": self._convert,
            "setp": self._compare, "bra": lambda: f"goto {_label(self._given[0])};", "ret": lambda: "return;",
            "mma": self._multiply, "shfl": self._shuffle, "atom": self._atomic, "cp": self._copy,
        }  # fmt: skip
        if name in rules:
            return rules[name]()
        if name == "bar":
            return self._barrier()
        if self._operation == "membar.gl":
            return "__threadfence();"
        if name == "wgmma":
            return self._wgmma()
        if self._operation == "fence.proxy.async.shared::cta":
            return "fence_for_wgmma();"
        if name == "nanosleep":
            return ";"
        if name == "setmaxnreg":
            return f"static_assert({self._given[0]} % 8 == 0);"
        if name == "ldmatrix":
            words = self._given[0].strip("{}").split(",")
            rows = self._touched("SHARED_MEMORY", f"shared.at({self._sum(self._given[1], 'u32')}, 16, 16)", "16")
            got = "".join(f"{word.strip()[1:]} = got[{at}]; " for at, word in enumerate(words))
            return f"unsigned got[4]; emulator_ldmatrix(got, {rows}, {_bool('trans' in self._parts)}, HERE); {got}"
        if name == "vote":
            asked = f"__{self._parts[2]}_sync({self._value(2, 'u32')}, {self._value(1, 'pred')})"
            return self._set(asked, "u32" if self._parts[2] == "ballot" else "pred")
        return self._set(self._computed(name), self._type)

    def _computed(self, name: str) -> str:
        kind = self._type
        if "f32" in self._parts and (function := MATHS.get(self._operation.rpartition(".")[0])):
            return f"{function}({self._value(1)})"
        a = self._value(1)
        if self._operation in ("fma.rn.bf16x2", "fma.rn.f16x2"):
            self._type = "b32"
            return f"fma_{self._parts[2]}({self._value(1)}, {self._value(2)}, {self._value(3)})"
        if self._operation == "add.rz.f32":
            return f"add_to_zero({a}, {self._value(2)})"
        if self._parts[1:-1] not in MODIFIERS[kind[0]].get(name, ([],)):
            raise PtxError(self._operation)
        if name in INFIX and kind == "pred":
            return f"{a} {INFIX[name]} {self._value(2)}"
        if name in INFIX:
            return f"{_unsigned(kind)}({a}) {INFIX[name]} {_unsigned(kind)}({self._value(2)})"
        if name == "not":
            return f"!{a}" if kind == "pred" else f"~{a}"
        if name == "neg":
            return f"-{_unsigned(kind)}({a})"
        if name in ("mul", "mad", "fma"):
            return self._product(name)
        if name in ("min", "max"):
            return f"{'least' if name == 'min' else 'largest'}<{TYPES[kind]}>({a}, {self._value(2)})"
        if name in ("div", "rem"):
            return f"{'divided' if name == 'div' else 'remainder'}<{TYPES[kind]}>({a}, {self._value(2)})"
        if name in ("shl", "shr"):
            return f"{name}<{TYPES[kind]}>({a}, {self._value(2, 'u32')})"
        if name == "selp":
            return f"{self._value(3, 'pred')} ? {a} : {self._value(2)}"
        if name == "copysign":  # the sign of a, the rest of b
            return f"copysignf({self._value(2)}, {a})"
        if name == "bfind":
            return f"{a} ? unsigned(__builtin_clz({a})) : 0xffffffffu"
        if name == "clz":
            return f"{a} ? unsigned(__builtin_clz({a})) : 32u"
        if name == "brev":
            return f"reversed({a})"
        if name == "bfi":
            return f"inserted<{TYPES[kind]}>({a}, {self._value(2)}, {self._value(3, 'u32')}, {self._value(4, 'u32')})"
        raise PtxError(name)

    def _product(self, name: str) -> str:
        kind, a, b = self._type, self._value(1), self._value(2)
        if kind[0] == "f":
            return f"fmaf({a}, {b}, {self._value(3)})" if name == "fma" else f"{a} * {b}"
        if "wide" in self._parts:
            self._type = f"{kind[0]}{2 * int(kind[1:])}"
            return f"{TYPES[self._type]}({a}) * {b}"
        if "hi" in self._parts:
            wide = TYPES[f"{kind[0]}{2 * int(kind[1:])}"]
            return f"{wide}({a}) * {b} >> {kind[1:]}"
        product = f"{_unsigned(kind)}(uint64_t({a}) * uint64_t({b}))"
        return f"{product} + {_unsigned(kind)}({self._value(3)})" if name == "mad" else product

    def _compare(self) -> str:
        _, how, _ = self._parts
        a, b = self._value(1), self._value(2)
        if how in COMPARE:
            return self._set(f"{a} {COMPARE[how]} {b}", "pred")  # false with a NaN; of != the compiler makes only neu
        return self._set(f"!({a} {INVERSE[how.removesuffix('u')]} {b})", "pred")  # true with a NaN

    def _convert(self) -> str:
        *rounding, to, from_ = self._parts[1:]
        if (rounding, from_) == (["rn"], "f32") and to in ("bf16x2", "f16x2"):
            return self._set(f"pack_{to[:-2]}({self._value(2)}, {self._value(1)})", "b32")
        if (rounding, from_) == (["rn"], "f32") and to in ("bf16", "f16"):
            return self._set(f"float_to_{to}({self._value(1)})", "u16")
        if (rounding, to, from_) == ([], "f32", "f16"):
            return self._set(f"f16_to_float({self._value(1, 'u16')})", "f32")
        value = self._value(1, from_)
        if to[0] != "f" and from_[0] == "f" and rounding == ["rzi"]:
            return self._set(f"to_whole<{TYPES[to]}>({value})", to)
        is_plain = not rounding if to[0] != "f" or from_[0] == "f" else rounding == ["rn"]
        if not is_plain:
            value = f"{WHOLE_NUMBERS[rounding[0]]}({value})"  # of a float, to the same type
        if from_[0] == "f" and (to[0] != "f" or int(to[1:]) < int(from_[1:]) or len(rounding) > 1):
            raise PtxError(self._operation)
        return self._set(f"{TYPES[to]}({value})", to)

    def _load(self) -> str:
        targets = [each.strip() for each in self._given[0].strip("{}").split(",")]
        read = "".join(_assign(target, f"at[{number}]", self._type) for number, target in enumerate(targets))
        return f"const {TYPES[self._type]}* at = {self._address(1, len(targets))}; {read}"

    def _store(self) -> str:
        sources = [each.strip() for each in self._given[1].strip("{}").split(",")]
        values = [self._operand(source, self._type) for source in sources]
        written = "".join(f"at[{number}] = {value}; " for number, value in enumerate(values))
        return f"{TYPES[self._type]}* at = {self._address(0, len(sources))}; {written}"

    def _address(self, at: int, count: int, how: str = "MEMORY") -> str:
        kind, bytes_ = TYPES[self._type], f"{count} * sizeof({TYPES[self._type]})"
        if "shared" in self._parts:
            place = f"shared.at({self._sum(self._given[at], 'u32')}, {bytes_}, {bytes_})"
            return f"({kind}*){self._touched(f'SHARED_{how}', place, bytes_)}"
        place = f"(void*)aligned({self._sum(self._given[at], 'u64')}, {bytes_})"
        if "global" in self._parts:
            return f"({kind}*){self._touched(f'GLOBAL_{how}', place, bytes_)}"
        if "param" not in self._parts:
            raise PtxError("only global and shared memory and parameters")
        return f"({kind}*){place}"

    def _touched(self, space: str, address: str, bytes_: str) -> str:
        """Return an address that an instruction reads or writes, for the counts of banks.h."""
        return f'touched({space}, {address}, {bytes_}, "{self._where}")'

    def _sum(self, address: str, kind: str) -> str:
        base, _, offset = address.strip("[]").partition("+")
        return f"{TYPES[kind]}({self._operand(base, kind)} + ({offset or 0}))"

    def _move(self) -> str:
        target, source = self._given
        if target.startswith("{"):
            halves = [each.strip() for each in target.strip("{}").split(",")]
            half = int(self._type[1:]) // len(halves)
            whole = self._operand(source, f"u{self._type[1:]}")
            return "".join(
                _assign(one, f"uint{half}_t({whole} >> {half * number})", f"u{half}")
                for number, one in enumerate(halves)
            )
        if source.startswith("{"):
            parts = [each.strip() for each in source.strip("{}").split(",")]
            width = int(self._type[1:]) // len(parts)
            joined = " | ".join(
                f"{TYPES[self._type]}({self._operand(one, f'u{width}')}) << {width * number}"
                for number, one in enumerate(parts)
            )
            return self._set(joined, self._type)
        return self._set(self._operand(source, self._type), self._type)

    def _shuffle(self) -> str:
        mode, (target, _, is_valid) = self._parts[2], self._given[0].partition("|")
        a, b, c, mask = self._value(1, "u32"), self._value(2, "u32"), self._value(3, "u32"), self._value(4, "u32")
        valid = f"{is_valid[1:]} = from.valid; " if is_valid else ""
        return f"const From from = from_{mode}({b}, {c}); {valid}" + _assign(
            target, f'emulator_shuffle<unsigned>({mask}, "shfl.{mode}", WHERE, {a}, from.lane)', "u32"
        )

    def _barrier(self) -> str:
        if self._parts[1] == "warp":
            return f"__syncwarp({self._value(0, 'u32')});"
        if self._parts[1] == "sync" and self._given == ["0"]:
            return "__syncthreads();"
        if self._parts[1] in ("sync", "arrive") and len(self._given) == 2:
            return f"barrier_{self._parts[1]}({self._value(0, 'u32')}, {self._value(1, 'u32')});"
        if self._parts[1] == "red" and self._given[1] == "0":
            name = {"popc": "count", "and": "and", "or": "or"}[self._parts[2]]
            return self._set(f"__syncthreads_{name}({self._value(2, 'pred')})", self._type)
        raise PtxError(self._operation)

    def _atomic(self) -> str:
        function = ATOMICS[self._parts[2]]
        values = ", ".join(self._value(at) for at in range(2, len(self._given)))
        return self._set(f"{function}({self._address(1, 1, 'ATOMICS')}, {values})", self._type)

    def _copy(self) -> str:
        if self._operation == "cp.async.commit_group":
            return "cp_async_commit();"
        if self._operation == "cp.async.wait_group":
            return f"emulator::land_all_but({self._given[0]});"
        if self._parts[2] != "cg" or self._given[2] != "16":
            raise PtxError(self._operation)
        to = self._touched("SHARED_MEMORY", f"shared.at({self._sum(self._given[0], 'u32')}, 16, 16)", "16")
        from_ = f"(void*){self._sum(self._given[1], 'u64')}"
        read = self._touched("GLOBAL_MEMORY", from_, "16")  # without a byte to copy nothing is read
        return f"const bool valid = {self._value(3, 'u32')} != 0; cp_async_16({to}, valid ? {read} : {from_}, valid);"

    def _multiply(self) -> str:
        d, a, b, c = ([each.strip()[1:] for each in given.strip("{}").split(",")] for given in self._given)
        if self._parts[3:] not in (["m16n8k16", "row", "col", "f32", kind, kind, "f32"] for kind in ("bf16", "f16")):
            raise PtxError(self._operation)
        return (
            f"float sums[4] = {{{', '.join(c)}}}; const unsigned left[4] = {{{', '.join(a)}}}; "
            f"mma_{self._parts[7]}(sums, left, {', '.join(b)}); "
            + "".join(f"{one} = sums[{at}]; " for at, one in enumerate(d))
        )

    def _wgmma(self) -> str:
        """A product is there at once: its registers are copied before the wait, which a compiler for GPUs joins."""
        if self._parts[1] == "fence":
            return "wgmma_fence();"
        if self._parts[1] == "commit_group":
            return "wgmma_commit();"
        if self._parts[1] == "wait_group":
            return f'emulator_finish_all_but({self._given[0]}, "wgmma.wait_group", WHERE);'
        d, *factors = self._given
        kind, sums = self._parts[6], [each.strip()[1:] for each in d.strip("{}").split(",")]
        left, right, add, *signs = factors
        columns = f"m64n{2 * len(sums)}k16"
        if self._parts[2:] != ["sync", "aligned", columns, "f32", kind, kind] or kind not in ("bf16", "f16"):
            raise PtxError(self._operation)
        from_registers = left.startswith("{")
        if signs != (["1", "1", "1"] if from_registers else ["1", "1", "0", "0"]) or (from_registers and add != "1"):
            raise PtxError(self._operation)
        words = ", ".join(each.strip()[1:] for each in left.strip("{}").split(","))
        a = f"const unsigned left[4] = {{{words}}};" if from_registers else f"const uint64_t left = {words};"
        more = "" if from_registers else f", {self._operand(add, 'pred')}"
        return (
            f"float sums[{len(sums) // 4}][4] = {{{', '.join(sums)}}}; {a} "
            f"wgmma_{kind}(sums, left, {self._operand(right, 'u64')}{more}); "
            'emulator_finish_open("wgmma", WHERE); '
            + "".join(f"{one} = sums[{at // 4}][{at % 4}]; " for at, one in enumerate(sums))
        )

    def _set(self, value: str, kind: str) -> str:
        return _assign(self._given[0], value, self._type if kind == "" else kind)

    def _value(self, at: int, kind: str = "") -> str:
        return self._operand(self._given[at], kind or self._type)

    def _operand(self, text: str, kind: str) -> str:
        """Return an operand as a value of a type: a register, a number, or the address of what has a name."""
        if text in SPECIAL:
            return SPECIAL[text]
        if text.startswith("%"):
            register = REGISTERS[re.sub(r"\d+$", "", text[1:])]
            if register[0] == "f" and kind[0] != "f":
                return f"emulator_bits<{TYPES[kind]}>({text[1:]})"
            if kind[0] == "f" and register[0] != "f":
                return f"emulator_bits<{TYPES[kind]}>({text[1:]})"
            return text[1:] if register == kind else f"{TYPES[kind]}({text[1:]})"
        if found := re.fullmatch(r"0([fd])([0-9A-Fa-f]+)", text):
            number, ending = ("float", "u") if found[1] == "f" else ("double", "ull")
            return f"emulator_bits<{number}>(0x{found[2]}{ending})"
        if re.fullmatch(r"-?\d+", text):
            return f"{TYPES[kind]}({text}ll)" if text != "-9223372036854775808" else "int64_t(1ull << 63)"
        if text == f"{self._kernel}_param_0":
            return "uint64_t(given)"
        if text in self._places:
            return f"{TYPES[kind]}({self._places[text]}u << {SHARED_BITS})"
        raise PtxError(f"operand {text}")


def _assign(target: str, value: str, kind: str) -> str:
    """Return the statement that gives a register a value of a type; `_` takes none."""
    if target == "_":
        return f"(void)({value}); "
    register = REGISTERS[re.sub(r"\d+$", "", target[1:])]
    if (register[0] == "f") != (kind[0] == "f"):
        return f"{target[1:]} = emulator_bits<{TYPES[register]}>({value}); "
    return f"{target[1:]} = {TYPES[kind]}({value}); "


def _label(text: str) -> str:
    return text.replace("$", "S")


def _unsigned(kind: str) -> str:
    return TYPES[kind if kind[0] == "f" else f"u{kind[1:]}"]


def _bool(is_true: bool) -> str:
    return "true" if is_true else "false"
