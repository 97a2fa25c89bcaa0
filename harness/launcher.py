"""Hydra's side: composed configurations in, one shared-engine sweep out.

A Hydra multirun hands all its jobs to a launcher at once. This one checks every job before any work
starts, then runs them in an order that shares the engine. Other launchers (Submitit, Ray, joblib) run
each job by itself, with an engine of its own.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from harness.settings import Settings, SettingsError


class SharedEngineLauncher(Launcher):
    """Runs a multirun as one sweep on one engine, and ends the process with the sweep's status."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Take what Hydra hands over before `launch`."""
        self._context, self._config = hydra_context, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Compose and check all jobs, then run them.

        Raises:
            SystemExit: always; its code is the sweep's exit status. Hydra would print a trace for
                the first failure only, and hide the others.
        """
        from harness.sweep import run_sweep

        loader = self._context.config_loader
        configs = [loader.load_sweep_config(self._config, list(o)) for o in job_overrides]
        raise SystemExit(run_sweep(settings_of(configs), sys.argv))


def settings_of(configs: Sequence[DictConfig]) -> list[Settings]:
    """Checked settings of composed configurations.

    Raises:
        SystemExit: with status 2, after saying for each wrong key what it takes.
    """
    settings, findings = [], []
    for config in configs:
        try:
            settings.append(Settings.from_tree(to_tree(config)))
        except (SettingsError, OmegaConfBaseException) as e:
            findings += [line for line in str(e).splitlines() if line.strip()]
    if findings:
        print("error: nothing was started; these settings are wrong:", file=sys.stderr)
        for finding in dict.fromkeys(findings):
            print(f"  {finding}", file=sys.stderr)
        raise SystemExit(2)
    return settings


def to_tree(config: DictConfig) -> dict[str, Any]:
    """A composed configuration as plain mappings, without Hydra's own part."""
    config = config.copy()
    with open_dict(config):
        config.pop("hydra", None)
        if config.get("experiment") is None:
            config.pop("experiment", None)
    tree = OmegaConf.to_container(config, resolve=True)
    assert isinstance(tree, dict)
    return {str(k): v for k, v in tree.items()}


def register() -> None:
    """Make the launcher known to Hydra as ``hydra/launcher=pruneroute``. Idempotent.

    Hydra instantiates only classes of the `hydra_plugins` namespace, which holds plugins that are
    distributions of their own. This one is part of the program, so it enters the namespace here.
    """
    plugins = Plugins.instance()  # it scans the namespace, so before anything is put there
    try:
        namespace = importlib.import_module("hydra_plugins")
    except ModuleNotFoundError:  # nobody else installed a plugin
        namespace = sys.modules.setdefault("hydra_plugins", types.ModuleType("hydra_plugins"))
    module = types.ModuleType("hydra_plugins.pruneroute")
    SharedEngineLauncher.__module__ = module.__name__
    module.SharedEngineLauncher = SharedEngineLauncher  # type: ignore[attr-defined]
    sys.modules[module.__name__] = namespace.pruneroute = module  # type: ignore[attr-defined]
    plugins.register(SharedEngineLauncher)
    target = f"{module.__name__}.{SharedEngineLauncher.__qualname__}"
    ConfigStore.instance().store("pruneroute", {"_target_": target}, group="hydra/launcher")
