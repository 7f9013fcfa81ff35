"""The command line: everything the app can do, without a browser.

Exit codes: 0 done; 2 bad input, with one line on stderr; 130 cancelled.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from psm_core.checkpoint import FILE_NAME, load_model, save_verified, verify_checkpoint
from psm_core.device import choose_device
from psm_core.errors import ParameterError, PsmError
from psm_core.experiments.evaluation import evaluate
from psm_core.experiments.plan import read_recipe, recipe_calibration, uniform_plan, write_recipe
from psm_core.experiments.record import COLUMNS, Record, size_change, to_row
from psm_core.experiments.store import ResultStore
from psm_core.experiments.study import Study, sweep_points
from psm_core.files import write_atomically
from psm_core.methods import METHODS, get_method
from psm_core.methods.base import Method, shape_text
from psm_core.network.compress import compressed_layers
from psm_core.network.layers import LayerRow, get_layer, layers
from psm_core.network.models import card_of
from psm_core.progress import JobCancelled, Step


class Parser(argparse.ArgumentParser):
    """Reports a wrong call as every other bad input: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise ParameterError(f"{message}; see {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        options = _parser().parse_args(arguments)
        options.run(options)
    except PsmError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, JobCancelled):
        print("cancelled; finished results are kept", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone; nothing is left to say
        return 0
    except OSError as error:  # a file or folder that cannot be used
        print(f"error: {error}; name another file or folder", file=sys.stderr)
        return 2
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="psm_core",
        description="Compress trained PyTorch networks by sparse and low-rank factorizations.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)

    def command(name: str, run: Callable[[argparse.Namespace], None], help: str) -> Parser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.set_defaults(run=run)
        return sub

    def model(sub: Parser) -> None:
        sub.add_argument(
            "model", metavar="MODEL", help="demo:fashion-cnn, torchvision:NAME, timm:NAME, hf:NAME, "
            "package.module:callable, or the path of a checkpoint",
        )  # fmt: skip

    def shared(sub: Parser, data: bool = True) -> None:
        if data:
            sub.add_argument(
                "--data", default="", metavar="SOURCE",
                help="demo:test, demo:train or a .npz file with x and y (default: the model's own)",
            )  # fmt: skip
        sub.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
        sub.add_argument("--cache", default="cache", metavar="DIR", help="where results are kept")

    def calibration(sub: Parser, default: str = "none") -> None:
        sub.add_argument(
            "--calibration", default="", metavar="SOURCE",
            help="fit to what the layers receive from this data, such as demo:train; none: to the weights "
            f"alone (default: {default})",
        )  # fmt: skip

    def as_json(sub: Parser) -> None:
        sub.add_argument("--json", action="store_true", help="print one JSON document")

    sub = command("layers", _layers, "List the layers of a model and which can be compressed.")
    model(sub)
    as_json(sub)

    sub = command("fit", _fit, "Factorize one layer.")
    model(sub)
    sub.add_argument("--layer", required=True, metavar="NAME")
    sub.add_argument("--method", required=True, metavar="NAME", help=", ".join(METHODS))
    sub.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a parameter of the method"
    )
    sub.add_argument("--fraction", type=float, help="a budget, instead of sizes set by hand")
    calibration(sub)
    shared(sub, data=False)
    as_json(sub)

    sub = command("sweep", _sweep, "Run methods over budgets, layer by layer and on the network.")
    model(sub)
    sub.add_argument("--methods", default=",".join(METHODS), metavar="A,B,…")
    sub.add_argument("--fractions", default="0.02,0.05,0.1,0.2", metavar="F,G,…")
    sub.add_argument("--layers", default="", metavar="A,B,…", help="only these (default: all)")
    sub.add_argument("--out", required=True, metavar="FILE.csv")
    calibration(sub)
    shared(sub)

    sub = command("compress", _compress, "Write a compressed checkpoint.")
    model(sub)
    how = sub.add_mutually_exclusive_group(required=True)
    how.add_argument("--method", metavar="NAME", help="one method for all layers, with --fraction")
    how.add_argument("--recipe", metavar="FILE", help="a JSON file of methods by layer")
    sub.add_argument("--fraction", type=float, help="share of the network's parameters to keep")
    sub.add_argument("--out", required=True, metavar="DIR")
    calibration(sub, "the data that a recipe names, else none")
    shared(sub)
    as_json(sub)

    sub = command("evaluate", _evaluate, "Measure the accuracy of a model or checkpoint.")
    model(sub)
    shared(sub)
    as_json(sub)

    sub = command("verify", _verify, "Reload a checkpoint in a fresh process and compare outputs.")
    sub.add_argument("path", metavar="DIR", help="a checkpoint's folder or file")
    sub.add_argument("--architecture", default="", metavar="SOURCE", help="if it names none")
    as_json(sub)
    return parser


def _layers(options: argparse.Namespace) -> None:
    rows = layers(_model(options))
    if options.json:
        print(json.dumps([dict(row) for row in rows], indent=2))
        return
    cells: list[tuple[str, ...]] = [("LAYER", "KIND", "SHAPE", "PARAMETERS", "SHARE", "MACS", "COMPRESSIBLE")]
    cells += [_layer_cells(row) for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    for row in cells:
        # Numbers to the right, words to the left.
        aligned = [
            c.rjust(w) if i in (3, 4, 5) else c.ljust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(aligned).rstrip())


def _layer_cells(row: LayerRow) -> tuple[str, ...]:
    return (
        row.name or "(the model itself)",
        row.kind,
        shape_text(row.shape),
        f"{row.parameters:,}",
        f"{row.share:.1%}",
        "" if row.macs is None else f"{row.macs:,}",
        "yes" if row.compressible else f"no: {row.reason}",
    )


def _fit(options: argparse.Namespace) -> None:
    model = _model(options)
    calibration = _calibration(options)
    study = Study(model, ResultStore(options.cache), device=options.device, calibration=calibration)
    method = _method(options, model)
    record, _ = study.fit(options.layer, method, _step_line(options.layer, calibration))
    _clear_line()
    if options.json:
        print(json.dumps(record.to_json(), indent=2))
        return
    print(f"{record.layer}: {method}")
    print(f"  relative error  {record.relative_error:.4f}")
    if record.output_error is not None:
        is_own = record.data == record.calibration
        print(f"  output error    {record.output_error:.4f} on {record.data}" +
              (" (on the data it was fitted to)" if is_own else _fitted_to(record.calibration)))  # fmt: skip
    print(f"  parameters      {record.parameters:,} of {record.dense_parameters:,} "
          f"({record.fraction:.2%})")  # fmt: skip
    print(f"  bytes           {record.nbytes:,} of {record.dense_nbytes:,}")
    print(f"  seconds         {record.seconds:.2f} on {record.device}"
          f"{' (answered from the cache)' if record.cached else ''}")  # fmt: skip
    if record.note:
        print(f"  note            {record.note}")


def _sweep(options: argparse.Namespace) -> None:
    out = Path(options.out)
    if not out.parent.is_dir():
        raise ParameterError(f"--out {out}: there is no folder '{out.parent}'; make it first")
    if out.is_dir():
        raise ParameterError(f"--out {out} is a folder; expected a file such as {out / 'results.csv'}")
    model = _model(options)
    names = [name for name in options.layers.split(",") if name]
    points, skipped = sweep_points(
        model, _list(options.methods), _fractions(options.fractions), names or None
    )
    store = ResultStore(options.cache)
    study = Study(model, store, options.data, options.device, _calibration(options))
    records = []
    for i, point in enumerate(points, 1):
        _line(f"{i}/{len(points)}  {point.label}")
        records.append(study.compute(point))
    _clear_line()
    for reason in skipped:
        print(f"skipped: {reason}", file=sys.stderr)
    write_atomically(out, _csv(records).encode())
    cached = sum(record.cached for record in records)
    print(f"{len(records)} results in {out}, {cached} of them from the cache, {len(skipped)} skipped")


def _compress(options: argparse.Namespace) -> None:
    out = Path(options.out)
    nearest = next(place for place in (out, *out.parents) if place.exists())
    if not nearest.is_dir():
        raise ParameterError(f"--out {out}: '{nearest}' is a file; expected a folder")
    model = _model(options)
    calibration = _calibration(options)
    if options.recipe:
        if options.fraction is not None:
            raise ParameterError("--fraction goes with --method; a recipe has its own budgets")
        plan = read_recipe(options.recipe)
        calibration = calibration if options.calibration else recipe_calibration(options.recipe)
    else:
        if options.fraction is None:
            raise ParameterError("--method needs --fraction, such as --fraction 0.1")
        plan = uniform_plan(model, options.method, options.fraction).layers
    study = Study(model, ResultStore(options.cache), options.data, options.device, calibration)
    record = study.network(plan, options.fraction, lambda name, step: _step_line(name, calibration)(step))
    _clear_line()
    result = save_verified(study.compressed(plan), out)
    write_recipe(out / "recipe.json", plan, card_of(model).source, calibration)
    if options.json:
        document = record.to_json() | {"path": str(out), "file_nbytes": result.nbytes}
        print(json.dumps(document | {"difference": result.difference}, indent=2))
        return
    print(f"{out / FILE_NAME}: {result.nbytes:,} bytes, from {record.dense_nbytes:,} "
          f"({size_change(record.dense_nbytes, result.nbytes)})")  # fmt: skip
    print(f"  parameters  {record.parameters:,} of {record.dense_parameters:,} ({record.fraction:.2%})")
    print(
        f"  layers      {len(plan)} compressed by {record.method}{_fitted_to(calibration)}; see recipe.json"
    )
    if record.accuracy is not None:
        print(f"  accuracy    {_accuracy(record.accuracy, record.low, record.high, record.samples)}")
    print(f"  verified    {_difference(result.difference, result.inputs)}")


def _evaluate(options: argparse.Namespace) -> None:
    model = _model(options)
    model = model.to(choose_device(options.device, next(iter(model.parameters()))))
    result = evaluate(model, options.data, lambda done, total: _line(f"{done}/{total}"))
    _clear_line()
    if options.json:
        print(json.dumps(result.to_json(), indent=2))
    else:
        kind = f", {len(compressed_layers(model))} layers compressed" if compressed_layers(model) else ""
        print(_accuracy(result.accuracy, result.low, result.high, result.samples)
              + f" from {result.data}{kind}")  # fmt: skip


def _verify(options: argparse.Namespace) -> None:
    result = verify_checkpoint(options.path, options.architecture)
    if options.json:
        print(json.dumps(vars(result) | {"ok": result.ok}, indent=2))
        return
    print(f"{result.path}: sound; reloaded in a fresh process as {result.source or 'given'}")
    print(f"  layers      {result.layers} compressed")
    print(f"  parameters  {result.parameters:,}")
    print(f"  file        {result.nbytes:,} bytes")
    print(f"  outputs     {_difference(result.difference, result.inputs)}")


def _model(options: argparse.Namespace) -> nn.Module:
    with contextlib.redirect_stdout(sys.stderr):  # what a download or a user's code prints
        model = load_model(options.model)
    if notice := card_of(model).notice:
        print(f"note: {notice}", file=sys.stderr)
    return model


def _calibration(options: argparse.Namespace) -> str:
    """The data to fit to, "" for the weights alone."""
    return "" if options.calibration == "none" else str(options.calibration)


def _fitted_to(calibration: str) -> str:
    return f", fitted to {calibration}" if calibration else ""


def _method(options: argparse.Namespace, model: nn.Module) -> Method:
    kind = get_method(options.method)
    shape = tuple(get_layer(model, options.layer).weight.shape)
    values = dict(_assignment(kind, text) for text in options.set)
    if options.fraction is None:
        return kind.from_params(values)
    return kind.at_budget(shape, options.fraction, **kind.check_fixed(values))


def _assignment(kind: type[Method], text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ParameterError(f"--set {text}: expected NAME=VALUE, such as K=10")
    declared = kind.parameters().get(name)
    if declared is None or declared.kind is str:
        return name, value
    try:
        return name, int(value)
    except ValueError:
        pass
    try:
        return name, float(value)
    except ValueError:
        raise ParameterError(
            f"--set {text}: '{value}' is not a number; expected {declared.range_text}"
        ) from None


def _list(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        get_method(name)
    if not names:
        raise ParameterError(f"--methods is empty; expected some of {','.join(METHODS)}")
    return names


def _fractions(text: str) -> list[float]:
    try:
        fractions = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ParameterError(f"--fractions {text}: expected numbers such as 0.02,0.05,0.1") from None
    if not fractions:
        raise ParameterError("--fractions is empty; expected numbers such as 0.02,0.05,0.1")
    return fractions


def _csv(records: Sequence[Record]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [*COLUMNS, "cached"])
    writer.writeheader()
    writer.writerows(to_row(record) for record in records)
    return text.getvalue()


def _accuracy(accuracy: float, low: float | None, high: float | None, samples: int | None) -> str:
    return f"{accuracy:.2%} on {samples:,} samples (95 % interval {low:.2%} to {high:.2%})"


def _difference(difference: float | None, inputs: str) -> str:
    if difference is None:
        return f"the tensors reload; {inputs}"
    return f"largest difference {difference:.1e} of the output's size, on {inputs}"


def _step_line(name: str, calibration: str) -> Callable[[Step], None]:
    error = "output error" if calibration else "relative error"
    return lambda step: _line(f"{name}  {step.iteration}/{step.total}  {error} {step.relative_error:.4f}")


def _line(text: str) -> None:
    """One line of progress that the next one replaces, where a person is watching."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:100]}", end="", file=sys.stderr, flush=True)


def _clear_line() -> None:
    _line("")
