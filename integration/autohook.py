"""Installs turboquant-vlm's hook when mlx_vlm is imported in this environment.

`turboquant-vlm enable` copies this file into site-packages, beside a .pth line that imports it at the start of every
Python program there; `turboquant-vlm disable` removes both. So it must be cheap (nothing but the standard library, and
nothing happens until mlx_vlm is imported) and must not fail, even after turboquant-vlm was uninstalled.
"""

import sys


class _AfterImport:
    """A finder that lets the others find mlx_vlm, and runs the hook once its package has been executed."""

    asking = False

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "mlx_vlm" or self.asking:
            return None
        import importlib.util

        self.asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.asking = False
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            execute = spec.loader.exec_module

            def exec_module(module):  # type: ignore[no-untyped-def]
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    _install()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _install() -> None:
    try:
        from turboquant_vlm.integration.enable import start
    except ImportError:
        return  # uninstalled without `turboquant-vlm disable`
    try:
        start()
    except Exception as error:
        print(f"turboquant-vlm: {error}", file=sys.stderr)


sys.meta_path.insert(0, _AfterImport())
