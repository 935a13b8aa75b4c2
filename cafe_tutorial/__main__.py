"""The command line: ``attack`` runs one attack, ``experiment`` repeats a measurement, ``doctor`` says what is at hand."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import signal
import sys

EXAMPLES = """examples:
  cafe-tutorial attack                                       800 digits, four workers, batches of 40, exact
  cafe-tutorial attack --data photos --rows 60 --batch-size 10
  cafe-tutorial attack --data breast-cancer --columns 5,10,15
  cafe-tutorial attack --method few-rounds --epochs 4        80 rounds instead of 840
  cafe-tutorial attack --method one-round                    one batch's gradient, row numbers hidden
  cafe-tutorial attack --method single-loop --rounds 8000    the paper's own schedule; about half an hour on a laptop
  cafe-tutorial attack --data faces.npz --rows 150           your own images (N, H, W[, 3]) and labels (N,)
  cafe-tutorial doctor
"""


def _setting(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    if value.lower() in ("true", "false", "none"):
        return name, {"true": True, "false": False, "none": None}[value.lower()]
    try:
        return name, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=VALUE, for example gamma=0") from None


def parser() -> argparse.ArgumentParser:
    from .attack import PRESETS
    from .checks import whole_numbers
    from .data import BUILT_IN, DOWNLOADED
    from .defense import DEFENSES
    from .experiments.command import add_arguments
    from .options import METHODS, NETWORKS, OPTIMIZERS, TRAINED
    from .protocol import SCHEDULES

    top = argparse.ArgumentParser(
        prog="cafe-tutorial", description="CAFE: how a server recovers private rows in vertical federated learning.",
        epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    a = commands.add_parser(
        "attack", help="run an attack and write report.json, leak.npz and leak.png",
        description="Simulate vertical federated learning on the data, attack it with what the server sees, and compare with the truth.",
        epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    what = a.add_argument_group("what is attacked")
    what.add_argument("--data", default="mnist-sample", metavar="NAME|PATH", help=f"built in: {', '.join(BUILT_IN)}; downloaded: {', '.join(DOWNLOADED)}; or an .npz file or a folder of class folders (default: mnist-sample)")
    what.add_argument("--rows", type=int, metavar="N", help="rows to draw (default: 800, or all of a smaller set)")
    what.add_argument("--workers", type=int, metavar="M", help="workers; images are cut into a grid of M tiles (default: 4, for tables 3)")
    what.add_argument("--columns", type=lambda text: whole_numbers(text, "5,10,15"), metavar="W1,W2,…", help="for tables: how many columns each worker holds")
    what.add_argument("--d2", type=int, default=256, help="outputs of each worker's first fully connected layer (default: 256)")
    what.add_argument("--network", choices=NETWORKS, default="released", help="for images: the released network, or the smooth one of sigmoids that DLG needs (default: released)")
    what.add_argument("--double-softmax", action="store_true", help="apply a second softmax before the loss, as the released code does")
    proto = a.add_argument_group("the protocol")
    proto.add_argument("--batch-size", type=int, metavar="K", help="rows a round (default: 40, or a twentieth of fewer than 800 rows)")
    proto.add_argument("--schedule", choices=SCHEDULES, help="random K-subsets, shuffled epochs, or fixed batches (default: random; epochs for few-rounds)")
    proto.add_argument("--pretrain", type=int, default=0, metavar="STEPS", help="train the model this many rounds before the attack begins (Adam, 1e-3)")
    proto.add_argument("--learning-rate", type=float, default=0.0, metavar="LR", help="train the model while it is attacked (default: 0, fixed)")
    proto.add_argument("--optimizer", choices=OPTIMIZERS, default="adam", help="what --learning-rate is for (default: adam)")
    proto.add_argument("--train", choices=TRAINED, default="all", help="which layers --learning-rate trains: all, or above: the first layers and what is above them (default: all)")
    proto.add_argument("--local-bottom", action="store_true", help="the workers keep the layers below the first to themselves: the server knows these as they were before any training, and not their gradients")
    proto.add_argument("--defense", metavar="NAME[:OPTION=VALUE,…]", help=f"what each worker and the head's holder do to their gradient before the server sees it: {', '.join(DEFENSES)}; for example fake:sigma=3,relative=true or dp:epsilon=10,clip_norm=3 (default: none)")
    how = a.add_argument_group("the attack")
    how.add_argument("--method", choices=METHODS, default="exact", help="default: exact; patient averages over many rounds, against noise; few-rounds intersects the spans of a few epochs' gradients; one-round finds the images whose h lies in one gradient's span; dlg to gc are earlier attacks in CAFE's loop, or on one batch where K = N")
    how.add_argument("--epochs", type=int, metavar="E", help="few-rounds: epochs to watch (default: 4)")
    how.add_argument("--rounds", type=int, metavar="T", help="rounds to watch; exact takes what it needs when this is not given, patient 10 times the rows, one-round 1, single-loop and the baselines 8000, nested-loops 8000 for each of its three steps")
    how.add_argument("--preset", choices=PRESETS, help="table 9's hyperparameters for the iterative methods (default: mnist for grey images and tables, cifar10 for colour)")
    how.add_argument("--set", type=_setting, action="append", default=[], metavar="NAME=VALUE", help="change one hyperparameter of the preset, for example --set gamma=0 --set switch_step2=1e-9")
    how.add_argument("--curve", type=int, default=0, metavar="T", help="iterative methods and baselines: record the score every T rounds in the report")
    a.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    a.add_argument("--seed", type=int, default=0, help="chooses rows, weights, batches and starts (default: 0)")
    a.add_argument("--out", default="out", metavar="DIR", help="folder for the results; an earlier report there is replaced once the new one is complete (default: out)")
    a.add_argument("--quiet", action="store_true", help="no progress bars")
    e = commands.add_parser("experiment", help="repeat a measurement and write its JSON", description="Repeat a measurement and write its JSON with command, seeds, device, versions and date.")
    add_arguments(e)
    commands.add_parser("doctor", help="say what is installed, which device would be used, which data sets are at hand")
    return top


def _command(arguments: argparse.Namespace) -> str:
    """The command again, without the output folder, and with the data's name for its path."""
    from pathlib import Path

    defaults, parts = vars(parser().parse_args(["attack"])), ["cafe-tutorial attack"]
    for name, value in vars(arguments).items():
        if value == defaults[name] or name in ("command", "out", "quiet"):
            continue
        option = f"--{name.replace('_', '-')}"
        if name == "set":
            parts += [f"{option} {key}={setting}" for key, setting in value]
        elif value is True:
            parts.append(option)
        else:
            text = Path(value).name if name == "data" else ",".join(map(str, value)) if isinstance(value, list) else value
            parts.append(f"{option} {shlex.quote(str(text))}")
    return " ".join(parts)


def attack(arguments: argparse.Namespace) -> int:
    from .options import AttackOptions
    from .report import check_output, write_outputs
    from .run import run_attack

    given = vars(arguments)
    names = AttackOptions.__dataclass_fields__
    options = AttackOptions(**{k: v for k, v in given.items() if k in names}, overrides=dict(arguments.set), progress=not arguments.quiet)
    check_output(arguments.out)
    outcome = run_attack(options)
    outcome.report["command"] = _command(arguments)
    write_outputs(arguments.out, outcome)
    report = outcome.report
    print(f"{report['method']}: {report['rows']} rows of {report['data']}, {report['workers']} workers, batches of {report['batch_size']}")
    print(f"rounds   {report['rounds']} in {report['seconds']:.0f} s")
    print(outcome.score)
    for note in outcome.leak.notes:
        print(f"note     {note}")
    print(f"written  {arguments.out}/report.json, leak.npz, leak.png")
    return 0


def experiment(arguments: argparse.Namespace) -> int:
    from .experiments.command import run

    return run(arguments)


def doctor(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from .data import BUILT_IN, DOWNLOADED, download_root
    from .options import choose_device
    from .report import device_name, versions

    for name, version in versions().items():
        print(f"{name:<15} {version}")
    print(f"{'device':<15} {device_name(choose_device('auto'))}")
    for name, what in BUILT_IN.items():
        print(f"{name:<15} built in: {what}")
    for name, what in DOWNLOADED.items():
        first = {"mnist": "MNIST/raw/train-images-idx3-ubyte", "cifar10": "cifar-10-batches-py/data_batch_1"}[name]
        here = (Path(download_root()) / first).exists()
        print(f"{name:<15} {'downloaded' if here else 'not downloaded yet'}: {what}")
    return 0


def _terminate(number, frame):
    """A request to end, ended as by Ctrl-C."""
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> int:
    """Entry point. Exit status 0, or 2 with one line on stderr for input that will not do, or 130 when interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, _terminate)
        arguments = parser().parse_args(argv)
        return {"attack": attack, "experiment": experiment, "doctor": doctor}[arguments.command](arguments)
    except (ValueError, OSError, MemoryError) as error:
        print(f"cafe-tutorial: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        print(f"cafe-tutorial: not enough memory; fewer rows, a smaller d2 or smaller images need less ({str(error).splitlines()[0]})", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"cafe-tutorial: interrupted; {stop if str(stop) else 'nothing was written'}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
