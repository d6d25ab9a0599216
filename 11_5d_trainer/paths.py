"""The one place that puts the in_depth/ folders of the chapters on the import path.

After `import paths`, `from gradient_reducers import BucketedReducer` imports the class that chapter 02
teaches. The trainer contains no technique of its own: what you read in a chapter is what runs here.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHAPTERS = (  # by name, because a folder beside them may be a copy of one
    "01_single_gpu 02_data_parallel 03_zero 04_tensor_parallel 05_context_parallel 06_pipeline_parallel "
    "07_expert_parallel 08_fpdt 09_kernels 10_mixed_precision"
)
for name in CHAPTERS.split():
    folder = HERE.parent / name / "in_depth"
    if str(folder) not in sys.path:
        sys.path.insert(1, str(folder))  # before installed packages, after the folder of the script that runs
