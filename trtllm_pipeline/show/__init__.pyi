# Names that other houses may import from `trtllm_pipeline.show`: its door. Loaded on first use by `doors.py`.
from . import doctor_findings as doctor_findings
from .cli.app import main as main
from .report.loaded import load_report as load_report
