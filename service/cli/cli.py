"""The command `slipstream`; `python -m service` is the same."""

from __future__ import annotations

import sys

import click

from core.errors import StartupError
from service.cli.lazy_group import LazyGroup
from service.process.logs import hush_libraries
from service.process.version import installed_version

COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("service.cli.commands.serve:serve", "Serve a checkpoint over gRPC."),
    "generate": ("service.cli.commands.generate:generate", "Stream a completion to the terminal."),
    "transcribe": ("service.cli.commands.transcribe:transcribe", "Write down what is said in a sound."),
    "check": ("service.cli.commands.check:check", "Say how a model would be served here, without serving it."),
    "embed": ("service.cli.commands.embed:embed", "Print the vector of a text."),
    "classify": ("service.cli.commands.classify:classify", "Print how well the labels of a model fit a text."),
    "score": ("service.cli.commands.score:score", "Rank documents by how well they answer a query."),
    "adapters": ("service.cli.commands.adapters:adapters", "List, load and unload LoRA adapters of a running server."),
    "control": ("service.cli.commands.control:control", "Pause a running server, change its weights, have it sleep."),
    "health": ("service.cli.commands.health:health", "Ask whether a server is ready; the exit code says it."),
    "trace": ("service.cli.commands.trace:trace", "Record what a running server's scheduler and device do."),
    "bench": ("service.bench:bench", "Measure the server on this machine."),
    "version": ("service.cli.cli:version", "Print the version."),
}


HELP_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


@click.group(cls=LazyGroup, table=COMMANDS, context_settings=HELP_SETTINGS)
@click.version_option(installed_version(), prog_name="slipstream")
def cli() -> None:
    """Slipstream streams tokens from a language model over gRPC.

    \b
    Try it, with the model that comes along:
      slipstream serve                      serve on 127.0.0.1:50051, metrics on 127.0.0.1:9464/metrics
      slipstream generate "27+45="           stream one completion to this terminal
      slipstream embed "a quick fox"        print a text's vector
      slipstream serve --model DIR          serve a Hugging Face checkpoint directory
      slipstream serve --model ORG/NAME     fetch a model from the hub and serve it
    """
    # Here for all commands: each one that loads a model imports these libraries, `serve` and benchmarks as well.
    hush_libraries()


@click.command()
def version() -> None:
    """Print the version."""
    click.echo(installed_version())


def main() -> None:
    """Run the command line. A StartupError ends it with one line on stderr and the error's exit code, no traceback."""
    try:
        cli(prog_name="slipstream")
    except StartupError as error:
        print(f"slipstream: {error.message}", file=sys.stderr)
        sys.exit(error.exit_code)
