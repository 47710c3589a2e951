"""`python -m fp4repro.roofline --model M --recipe R --device D`: what a recipe gains on a GPU, modelled.

With `--table FILE` (no other options needed) the whole comparison: every published row with its error,
and the four speed-ups on GB200 and GB300. With `--predict FILE` the times of every product and
pass of a model's linears on a GPU, written before they are measured there.
"""

import argparse
from pathlib import Path

from fp4repro.errors import Fp4ReproError, run_stage
from fp4repro.report.markdown import aligned
from fp4repro.report.schema import write_rows
from fp4repro.roofline import tables
from fp4repro.roofline.calibrate import cases, checks, fitted, model_config
from fp4repro.roofline.devices import device
from fp4repro.roofline.recipes import speed_recipe, speed_recipe_names
from fp4repro.roofline.speedup import linear_gains, speedups
from fp4repro.roofline.step import Setting, step


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fp4repro.roofline", description=__doc__)
    parser.add_argument("--model", default="nemotron-12b", help="a file of configs/models, by its name")
    parser.add_argument("--recipe", default="nvfp4", help=", ".join(speed_recipe_names()))
    parser.add_argument("--device", default="GB300", help="a device of configs/devices.yaml")
    parser.add_argument("--baselines", nargs="+", default=["bf16", "mxfp8"], metavar="RECIPE")
    for name, default, what in (
        ("sequence", 8192, "tokens of a sequence"),
        ("microbatch", 2, "sequences that a GPU takes at once"),
        ("batch", 256, "sequences of a step"),
        ("gpus", 16, "GPUs"),
        ("tp", 1, "tensor parallel"),
        ("pp", 1, "pipeline stages"),
        ("vp", 1, "virtual stages a GPU"),
        ("cp", 1, "context parallel"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default {default})")
    parser.add_argument("--exposed", type=float, default=0.0, help="share of communication not hidden")
    parser.add_argument("--table", type=Path, help="CSV of the whole comparison to write")
    parser.add_argument("--predict", type=Path, help="CSV of predicted times of products and passes")
    arguments = parser.parse_args()
    if arguments.table:
        found = checks(cases(), fitted())
        write_rows(arguments.table, tables.rows(found, fitted()))
        print(tables.summary(found))
    elif arguments.predict:
        config, on = model_config(arguments.model), device(arguments.device)
        tokens = arguments.sequence * arguments.microbatch
        write_rows(arguments.predict, tables.predictions(arguments.model, config, on, fitted(), tokens))
        print(f"predicted, not measured: {arguments.predict}")
    else:
        _print(arguments)


def _print(arguments: argparse.Namespace) -> None:
    if not 0 <= arguments.exposed <= 1:
        raise Fp4ReproError(f"--exposed is {arguments.exposed}, but must be a share from 0 to 1")
    config, recipe, on = (
        model_config(arguments.model),
        speed_recipe(arguments.recipe),
        device(arguments.device),
    )
    sizes = ("sequence", "microbatch", "batch", "gpus", "tp", "pp", "vp", "cp", "exposed")
    setting = Setting(**{name: getattr(arguments, name) for name in sizes})
    factors = fitted()
    predicted = step(config, recipe, on, factors, setting)
    print(f"{arguments.model} under {recipe.name} on {on.what}: modelled, not measured")
    print(
        f"  {setting.tokens:,} tokens a microbatch; {predicted.tokens_per_second:,.0f} tokens/s a GPU, ",
        end="",
    )
    print(f"{predicted.tflops:,.0f} model TFLOP/s; a step takes {predicted.seconds:.3g} s, of which")
    for part, seconds in predicted.seconds_of.most_common():
        if seconds:
            print(f"  {100 * seconds / predicted.seconds:5.1f} %  {part}")
    header = ["speed-up over", "peak ratio (a bound)", "kernel only", "with quantisation", "end to end"]
    lines, losses = [], []
    for name in arguments.baselines:
        baseline = speed_recipe(name)
        s = speedups(config, recipe, baseline, on, factors, setting)
        lines.append([name, *(f"{v:.2f}x" for v in (s.peak, s.kernel, s.quantised, s.end_to_end))])
        for g in linear_gains(config, recipe, baseline, on, factors, setting):
            wins = f"from {g.break_even:,} tokens on" if g.break_even else "never"
            verdict = "loses" if g.gain <= 1 else "wins"
            name_of = f"{g.linear.kind}.{g.linear.name}"
            shape = f"{g.linear.fan_in} to {g.linear.fan_out}"
            losses.append([name_of, shape, name, f"{g.gain:.2f}x", verdict, wins])
    print("\n" + "\n".join(aligned(header, lines)))
    header = ["linear", "features", "against", "with quantisation", "here", f"{recipe.name} is faster"]
    print("\n" + "\n".join(aligned(header, losses)))


if __name__ == "__main__":
    run_stage("fp4repro.roofline", main)
