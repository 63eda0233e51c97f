"""What one member, source and bridge, and ensembles cost in one interleaved run: time, arithmetic, memory."""

from ensbridge.deploy.benchmark.bench import Benchmark as Benchmark
from ensbridge.deploy.benchmark.bench import bench as bench
from ensbridge.deploy.benchmark.bench import bench_folder as bench_folder
