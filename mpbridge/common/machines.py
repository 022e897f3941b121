"""Machines by name: compute capability, memory, dense peak speed by format, links. Data from the vendor's pages; nothing is probed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mpbridge.common.errors import UnknownName

Arch = tuple[int, int]
"""CUDA compute capability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One type of device, as used by can_run and the memory estimate. Tests and scripts construct them directly."""

    name: str
    arch: Arch | None
    """CUDA compute capability; None: no GPU."""
    memory_bytes: int = 0
    """torch's total_memory; 0: unknown. `memory_source` says whether it was read on such a device, inferred, or is the vendor's figure."""
    memory_source: str = ""
    peak: tuple[tuple[str, float], ...] = ()
    """(format, dense TFLOP/s of the tensor cores; "fp32": of the CUDA cores). With FP32 accumulation if the vendor lists two rates."""
    bandwidth: float = 0.0
    """Memory bandwidth, bytes per second; 0: unknown."""
    multiprocessors: int = 0
    """Number of SMs; 0: unknown."""
    clock: float = 0.0
    """Boost clock, Hz; 0: unknown."""
    nvlink: float = 0.0
    """Bytes per second and direction to GPUs of the same domain (NVLink, or PCIe without it); 0: unknown."""
    domain: int = 1
    """Number of GPUs connected by `nvlink`: 8 on an HGX board, 72 in an NVL72 rack."""
    network: float = 0.0
    """Bytes per second, direction and GPU to other domains; 0: no typical value, so the time of such traffic is not predicted."""
    link_source: str = ""
    source: str = ""
    note: str = ""

    @property
    def gpu(self) -> bool:
        """Whether there is a CUDA device at all."""
        return self.arch is not None

    @property
    def sm(self) -> str:
        """'sm_90', or 'cpu'."""
        return "cpu" if self.arch is None else f"sm_{self.arch[0]}{self.arch[1]}"

    @property
    def label(self) -> str:
        """Name and compute capability: 'H100 (sm_90)'; for a CPU just the name."""
        return f"{self.name} ({self.sm})" if self.gpu else self.name

    def flops(self, number_format: str) -> float | None:
        """Dense FLOP/s of GEMMs in "fp32", "tf32", "fp16", "bf16", "fp8" or "fp4"; None: not supported, or unknown."""
        found = dict(self.peak).get(number_format)
        return None if found is None else found * 1e12


GIB = 2**30
_RATIO = 79.65 * GIB / 80e9
"""Ratio of the memory that torch reports on an H100 to the vendor's gigabytes. It is inferred to hold for the other NVIDIA data-center GPUs, as `memory_source` states."""

_HGX = "HGX board with NVSwitch; one network card per GPU"
_PCIE = "PCIe x16, eight per host; no usual network"
_LINKS = {
    "V100": (150, 8, 12.5, _HGX), "A100": (300, 8, 25, _HGX), "H100": (450, 8, 50, _HGX), "H200": (450, 8, 50, _HGX),
    "GH200": (450, 1, 50, "one GPU per host; one network card per GPU"),
    "B200": (900, 8, 50, _HGX), "B300": (900, 8, 100, f"{_HGX} (800 Gb/s: an assumption)"),
    "GB200": (900, 72, 50, "NVL72 rack; one network card per GPU"), "GB300": (900, 72, 100, "NVL72 rack; one network card per GPU (800 Gb/s: an assumption)"),
    "T4": (16, 8, 0, _PCIE), "A10": (32, 8, 0, _PCIE), "L4": (32, 8, 0, _PCIE), "L40S": (32, 8, 0, _PCIE), "RTX 4090": (32, 8, 0, _PCIE),
    "RTX 5090": (64, 8, 0, _PCIE), "RTX PRO 6000": (64, 8, 0, _PCIE),
}  # fmt: skip
"""(GB/s and direction to GPUs of the same domain, GPUs in it, GB/s and direction to others, source) in the GPU's usual system."""
_CHIPS = {
    "V100": (80, 1.53), "T4": (40, 1.59), "A100": (108, 1.41), "A10": (72, 1.695), "L4": (58, 2.04), "L40S": (142, 2.52), "RTX 4090": (128, 2.52),
    "H100": (132, 1.75), "H200": (132, 1.75), "GH200": (132, 1.75), "B200": (148, 1.85), "GB200": (152, 1.9), "B300": (148, 1.85), "GB300": (152, 1.9),
    "RTX 5090": (170, 2.41), "RTX PRO 6000": (188, 2.6),
}  # fmt: skip
"""(SMs, GHz) from the vendor's architecture papers; the clock of Blackwell data-center GPUs is an assumption."""
_READ = {"H100": 79.65, "B200": 178.35, "RTX 4090": 23.64}
"""GiB that torch reported on such a device (in out-of-memory messages)."""
_INFERRED = ("A100", "H200", "GH200", "GB200", "B300", "GB300")


def _memory(name: str, gigabytes: float) -> tuple[int, str]:
    """(bytes, their source)."""
    if name in _READ:
        return int(_READ[name] * GIB), "as reported by torch"
    if name in _INFERRED:
        return int(gigabytes * 1e9 * _RATIO), "the vendor's gigabytes at the H100's ratio: an inference"
    return int(gigabytes * 1e9), "the vendor's gigabytes, times 10**9"


def _gpu(
    name: str, arch: Arch, gigabytes: float, bandwidth: float, source: str, note: str = "", **peak: float
) -> Machine:
    memory, known = _memory(name, gigabytes)
    (nvlink, domain, network, links), (units, clock) = _LINKS[name], _CHIPS[name]
    return Machine(
        name=name, arch=arch, memory_bytes=memory, memory_source=known, bandwidth=bandwidth * 1e9, peak=tuple(peak.items()),
        multiprocessors=units, clock=clock * 1e9, nvlink=nvlink * 1e9, domain=domain, network=network * 1e9,
        link_source=links, source=source, note=note,
    )  # fmt: skip


_SITE = "https://www.nvidia.com/en-us/data-center"
_BLACKWELL_RTX = "NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A"
_ROWS: tuple[Machine, ...] = (
    _gpu("V100", (7, 0), 32, 900, f"{_SITE}/v100/", "SXM2", fp32=15.7, fp16=125),
    _gpu("T4", (7, 5), 16, 320, f"{_SITE}/tesla-t4/", fp32=8.1, fp16=65),
    _gpu("A100", (8, 0), 80, 2039, f"{_SITE}/a100/", "SXM, 80 GB", fp32=19.5, tf32=156, fp16=312, bf16=312),
    _gpu("A10", (8, 6), 24, 600, f"{_SITE}/products/a10-gpu/", fp32=31.2, tf32=62.5, fp16=125, bf16=125),
    _gpu("L4", (8, 9), 24, 300, f"{_SITE}/l4/", "half of the page's sparse rates", fp32=30.3, tf32=60, fp16=121, bf16=121, fp8=242.5),
    _gpu("L40S", (8, 9), 48, 864, f"{_SITE}/l40s/", fp32=91.6, tf32=183, fp16=362, bf16=362, fp8=733),
    _gpu("RTX 4090", (8, 9), 24, 1008, "NVIDIA Ada GPU Architecture whitepaper, appendix A", fp32=82.6, tf32=82.6, fp16=165.2, bf16=165.2, fp8=330.3),
    _gpu("H100", (9, 0), 80, 3350, f"{_SITE}/h100/", "SXM; half of the page's sparse rates", fp32=67, tf32=494.5, fp16=989.5, bf16=989.5, fp8=1979),
    _gpu("H200", (9, 0), 141, 4800, f"{_SITE}/h200/", "SXM; half of the page's sparse rates", fp32=67, tf32=494.5, fp16=989.5, bf16=989.5, fp8=1979),
    _gpu(
        "GH200", (9, 0), 96, 4000, f"{_SITE}/grace-hopper-superchip/", "96 GB HBM3; there is one of 144 GB", fp32=67, tf32=494, fp16=990, bf16=990, fp8=1979
    ),
    _gpu("B200", (10, 0), 180, 7700, f"{_SITE}/hgx/", "an eighth of HGX B200", fp32=75, tf32=1100, fp16=2250, bf16=2250, fp8=4500, fp4=9000),
    _gpu("GB200", (10, 0), 186, 8000, f"{_SITE}/gb200-nvl72/", "one GPU of NVL72", fp32=80, tf32=1250, fp16=2500, bf16=2500, fp8=5000, fp4=10000),
    _gpu("B300", (10, 3), 270, 7700, f"{_SITE}/hgx/", "an eighth of HGX B300", fp32=75, tf32=1100, fp16=2250, bf16=2250, fp8=4500, fp4=13500),
    _gpu("GB300", (10, 3), 279, 8000, f"{_SITE}/gb300-nvl72/", "one GPU of NVL72", fp32=80, tf32=1250, fp16=2500, bf16=2500, fp8=5000, fp4=15000),
    _gpu("RTX 5090", (12, 0), 32, 1792, _BLACKWELL_RTX, fp32=104.8, tf32=104.8, fp16=209.5, bf16=209.5, fp8=419, fp4=1676),
    _gpu(
        "RTX PRO 6000", (12, 0), 96, 1792, "NVIDIA RTX PRO 6000 Blackwell datasheet", "Workstation Edition", fp32=125, fp16=503.8, bf16=503.8, fp8=1007.6, fp4=2015.2
    ),
    Machine(name="CPU", arch=None, source="no accelerator: mpbridge's device layer", note="memory is this host's own"),
)  # fmt: skip


def key(name: str) -> str:
    """Normalised form of a machine's name: 'RTX-4090', 'rtx 4090' and 'rtx4090' are the same."""
    return "".join(c for c in name.lower() if c.isalnum())


machines: Mapping[str, Machine] = MappingProxyType({key(row.name): row for row in _ROWS})
"""Every known machine by its normalised name, in table order."""
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "h100sxm": "h100", "h10080gb": "h100", "a10080gb": "a100", "4090": "rtx4090", "5090": "rtx5090", "rtxpro6000blackwell": "rtxpro6000",
        "sm70": "v100", "sm75": "t4", "sm80": "a100", "sm86": "a10", "sm89": "l4", "sm90": "h100", "sm100": "b200", "sm103": "b300", "sm120": "rtx5090",
    }
)  # fmt: skip


def machine(name: str) -> Machine:
    """The machine with that name or alias, or the first one of an architecture such as 'sm_90'. Raises UnknownName with the nearest names."""
    found = ALIASES.get(key(name), key(name))
    if found not in machines:
        raise UnknownName("machine", name, [*machines, *ALIASES])
    return machines[found]


def like(product: str) -> Machine | None:
    """The table's row for a driver's product name ('NVIDIA H100 80GB HBM3'); None if it is not in the table."""
    words = [key(word) for word in product.replace("-", " ").split()]
    joined = "".join(words)
    for row in sorted(_ROWS, key=lambda r: -len(r.name)):
        wanted = key(row.name)
        # a single-word name must match a whole word: an A100 is not an A10, a GB200 is not a B200
        if row.gpu and (wanted in words or (" " in row.name and wanted in joined)):
            return row
    return None
