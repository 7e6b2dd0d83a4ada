"""The command line in this process: what it returns, prints and complains of."""

import signal
import sys

import pytest

from fedflat.cli import main
from fedflat.cli.app import err, out


@pytest.fixture
def called_in(monkeypatch, capsys):
    """A function of a folder and a width of the terminal, which gives the command `fedflat` there."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    terminated = signal.getsignal(signal.SIGTERM)

    def there(folder, width=160):
        monkeypatch.chdir(folder)
        for console in (out, err):
            monkeypatch.setattr(console, "width", width)

        def call(*arguments):
            monkeypatch.setattr(sys, "argv", ["fedflat", *map(str, arguments)])
            with pytest.raises(SystemExit) as ended:
                main()
            return ended.value.code or 0, *capsys.readouterr()

        return call

    yield there
    signal.signal(signal.SIGTERM, terminated)
