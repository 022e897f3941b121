"""What pyproject.toml cannot say: configs/ stands beside the package, and goes into a wheel as mpbridge/configs."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithConfigs(build_py):
    """Copies the package, and the configurations into it."""

    def build_package_data(self) -> None:
        """Files that are not code."""
        super().build_package_data()
        for source in sorted(Path("configs").rglob("*.yaml")):
            target = Path(self.build_lib, "mpbridge", source)
            self.mkpath(str(target.parent))
            self.copy_file(str(source), str(target), preserve_mode=False)


setup(cmdclass={"build_py": WithConfigs})
