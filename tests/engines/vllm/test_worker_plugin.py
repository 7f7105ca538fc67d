import subprocess
import sys

from kvaudit.engines.vllm.worker import plugin

LEFT_ALONE = """
import sys
from kvaudit.engines.vllm.worker import plugin
plugin.register()
assert plugin.session() is None
heavy = {"vllm", "lmcache", "torch"} & set(sys.modules)
assert not heavy, heavy
"""


def test_a_vllm_of_somebody_else_is_left_alone(monkeypatch):
    monkeypatch.delenv(plugin.ENABLED, raising=False)
    subprocess.run([sys.executable, "-c", LEFT_ALONE], check=True)
