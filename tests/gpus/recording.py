"""Answers of a driver, recorded on a machine with a GPU and played back where there is none.

    python tests/gpus/recording.py FILE

records what `read_gpus` and `mig_layout` ask for.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """An error of the driver's library."""


class Recorded:
    """An object with functions of `pynvml` that answers as recorded: the same questions, in any order."""

    NVMLError = NVMLError

    def __init__(self, answers: dict[str, Any], constants: dict[str, int]) -> None:
        self._answers = answers
        self.__dict__.update(constants)

    @classmethod
    def read(cls, file: Any) -> "Recorded":
        """The answers in a file."""
        recorded = json.loads(file.read_text())
        return cls(recorded["answers"], recorded["constants"])

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self._answer(question(name, arguments))

    def _answer(self, asked: str) -> Any:
        answer = self._answers.get(asked, {"error": f"nobody asked {asked} while this was recorded"})
        if isinstance(answer, dict) and "error" in answer:
            raise NVMLError(answer["error"])
        return SimpleNamespace(**answer) if isinstance(answer, dict) else answer


class Recorder:
    """Asks the driver and keeps its answers; handles become words."""

    CONSTANTS = ("NVML_DEVICE_MIG_ENABLE", "NVML_GPU_INSTANCE_PROFILE_COUNT")

    def __init__(self, nvml: Any) -> None:
        self._nvml, self.NVMLError, self.answers = nvml, nvml.NVMLError, {}
        self.constants = {name: getattr(nvml, name) for name in self.CONSTANTS}
        self.__dict__.update(self.constants)
        self._handles: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        def ask(*arguments: Any) -> Any:
            asked = question(name, arguments)
            given = [self._handles.get(each, each) if isinstance(each, str) else each for each in arguments]
            try:
                found = getattr(self._nvml, name)(*given)
            except self._nvml.NVMLError as error:
                self.answers[asked] = {"error": str(error)}
                raise
            if "HandleBy" in name:
                self._handles[asked], self.answers[asked] = found, asked
                return asked
            if hasattr(found, "_fields_"):
                fields = {field[0]: getattr(found, field[0]) for field in found._fields_}
                self.answers[asked] = {
                    field: value.decode() if isinstance(value, bytes) else value for field, value in fields.items()
                }
            else:
                self.answers[asked] = found
            return found

        return ask


def question(name: str, arguments: Any) -> str:
    """A call as a word."""
    return f"{name}({', '.join(map(str, arguments))})"


def main() -> None:
    from rollmill.gpus.devices import open_nvml, read_gpus
    from rollmill.gpus.mig import mig_layout

    with open_nvml() as nvml:
        recorder = Recorder(nvml)
        for gpu in read_gpus(recorder):
            print(gpu)
            try:
                print(mig_layout(recorder, gpu, 7))
            except Exception as error:
                print(error)
        driver = nvml.nvmlSystemGetDriverVersion()
    recorded = {"driver": driver, "constants": recorder.constants, "answers": recorder.answers}
    with open(sys.argv[1], "w") as file:
        json.dump(recorded, file, indent=1)


if __name__ == "__main__":
    main()
