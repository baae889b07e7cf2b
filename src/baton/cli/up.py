"""`baton up`: a whole deployment on this machine, until it is interrupted."""

from __future__ import annotations

from functools import partial

from baton import settings
from baton.cli.options import LAYOUT_REMEDIES, DeploymentOptions
from baton.cli.parser import command
from baton.errors import ConfigError


@partial(command, remedies=LAYOUT_REMEDIES)
def up(options: DeploymentOptions) -> None:
    """Start a registry, prefill and decode instances and a router, and serve until interrupted.

    Between GPUs the default transport is cuda_ipc.
    VLLM-ARGS, with --engine vllm, are options of `vllm serve`.
    """
    # What follows takes longer to import than --help may take.
    from baton.cli.checks import check_first, check_transport

    instance, layouts = options.instance, [layout for _, _, layout in options.layouts]
    if not options.is_vllm:
        if options.vllm or options.vllm_args:
            words = " ".join(options.vllm_args or ["--vllm"])
            raise ConfigError(f"{words!r} is for vLLM; give --engine vllm too, or leave it out")
        check_first(instance.model, layouts, instance.dtype)
    settings.check_port(options.host, options.port)
    check_transport(instance.transport)
    from baton.cli.start import start

    start(options)
