"""`gptoss bench`: one module a benchmark, each ending in a table and a JSON line a cell.

`prefill` and `decode` are the published benchmark, `throughput` requests queued at once at the
engine alone, `serve` the way through a tritonserver, `ops` single operators; `floors`
tells the least times, `plot` and `table` show result files. All but `serve` need no server.
"""

import typer

from gptoss_backend.cli.bench.decode import decode
from gptoss_backend.cli.bench.floor_tables import floors
from gptoss_backend.cli.bench.ops import ops
from gptoss_backend.cli.bench.prefill import prefill
from gptoss_backend.cli.bench.recorded import plot, table
from gptoss_backend.cli.bench.serve import serve
from gptoss_backend.cli.bench.throughput import throughput

app = typer.Typer(no_args_is_help=True, help="Measure this machine; a table, then JSON lines.")
for command in (prefill, decode, throughput, serve, ops, floors, plot, table):
    app.command()(command)
