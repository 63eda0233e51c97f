"""What one member, source and bridge, and ensembles cost in one interleaved run: time, arithmetic, memory."""

from ensbridge.benching.bench import Benchmark as Benchmark
from ensbridge.benching.bench import bench as bench
from ensbridge.benching.bench import bench_folder as bench_folder
