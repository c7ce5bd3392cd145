"""Runs a unit of ops/systemd as systemd would, as far as the processes of a service go.

The command line, the environment and the directories are those of the unit; `stop` kills as its
`KillMode` says; `restarts` decides by the exit status as its `Restart` says.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import psutil

from tests.adaptive_timeouts import patient

UNITS = Path(__file__).parents[3] / "ops" / "systemd"
_EXECUTABLE = "/opt/keepstep/bin/keepstep"


class Service:
    """One instance of a template unit.

    Args:
        template: the unit's name up to the @.
        instance: the name after it.
        root: in which the directories of the machine are.
        environment: the lines of the file that `EnvironmentFile` names.
    """

    def __init__(
        self, template: str, instance: str, root: Path, environment: dict[str, str]
    ) -> None:
        self._root = root
        specifiers = {"%i": instance, "%t": str(root / "run"), "%S": str(root / "lib")}
        self.settings: dict[str, list[str]] = defaultdict(list)
        for line in _lines(UNITS / f"{template}@.service"):
            name, is_setting, value = line.partition("=")
            if is_setting:
                for specifier, text in specifiers.items():
                    value = value.replace(specifier, text)
                self.settings[name].append(value)
        runtime = root / "run" / self._one("RuntimeDirectory")
        runtime.mkdir(parents=True, mode=int(self._one("RuntimeDirectoryMode"), 8))
        state = root / "lib" / self._one("StateDirectory")
        state.mkdir(parents=True)
        self._variables = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            **_assignments(self.settings["Environment"]),
            **environment,
        }
        self._main: subprocess.Popen[bytes] | None = None
        self._log = root / "journal"

    def start(self) -> None:
        words = []
        for word in shlex.split(self._one("ExecStart")):
            # A variable that is a word of its own is split; ${NAME} would not be.
            words += shlex.split(self._variables[word[1:]]) if word[0] == "$" else [word]
        assert words[0] == _EXECUTABLE
        with self._log.open("ab") as log:
            self._main = subprocess.Popen(
                [sys.executable, "-P", "-m", "keepstep", *words[1:]],
                env=self._variables,
                cwd=self._one("WorkingDirectory"),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def stop(self) -> int:
        """Stop it as `systemctl stop` does; return the exit status of the main process."""
        assert self._main is not None
        match self._one("KillMode"):
            case "process":
                self._main.terminate()
            case "control-group":
                for process in self.processes():
                    process.send_signal(signal.SIGTERM)
        # After that systemd would kill it.
        status = self._main.wait(patient(float(self._one("TimeoutStopSec"))))
        if self._one("KillMode") != "process":
            for process in self.processes():
                process.kill()
        return status

    def wait(self) -> int:
        """Return the exit status of the main process; negative: the signal that killed it."""
        assert self._main is not None
        return self._main.wait(patient(120))

    def kill(self) -> int:
        """Kill the main process, as the kernel does when memory is short."""
        assert self._main is not None
        self._main.kill()
        return self._main.wait()

    def restarts(self, status: int) -> bool:
        """Return whether systemd starts it again by itself."""
        assert self._one("Restart") == "on-failure"
        clean = {0, *_numbers(self._one("SuccessExitStatus"))}
        never = _numbers(self._one("RestartPreventExitStatus"))
        return status not in clean and status not in never

    def processes(self) -> list[psutil.Process]:
        """Return the processes of its control group, all that it and its processes have started."""
        found = []
        for process in psutil.process_iter():
            try:
                is_own = (
                    process.environ().get("XDG_RUNTIME_DIR") == self._variables["XDG_RUNTIME_DIR"]
                )
                if is_own and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def output(self) -> str:
        return self._log.read_text()

    def close(self) -> None:
        for process in self.processes():
            process.kill()
        if self._main is not None:
            self._main.wait()

    def _one(self, name: str) -> str:
        (value,) = self.settings[name]
        return value


def _lines(path: Path) -> list[str]:
    text = path.read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line and line[0] not in "#["]


def _assignments(lines: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for line in lines for word in shlex.split(line))


def _numbers(text: str) -> set[int]:
    return {int(word) for word in text.split()}
