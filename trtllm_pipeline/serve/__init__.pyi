# Names that other houses may import from `trtllm_pipeline.serve`: its door. Loaded on first use by `doors.py`.
from .export import cell_export as cell_export
from .export import deployment as deployment
from .export import hub as hub
from .gateway import gateway_config as gateway_config
from .gateway import run as run
from .gateway.dialects import dialect_for as dialect_for
from .gateway.keys import read_keys as read_keys
from .kept import control as control
from .kept import serve_target as serve_target
from .kept import servers as servers
from .kept import shown as shown
from .kept import systemd as systemd
from .kept.prometheus_setup import write as write
from .kept.serve_target import ServeTarget as ServeTarget
