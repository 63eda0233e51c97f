"""Using a trained model: saving and loading, export, CUDA graphs, benchmarks, prediction of files."""
