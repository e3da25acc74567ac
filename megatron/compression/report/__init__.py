"""What users see of a run: the log line, scalars for trackers, and the report of one run or of
two."""

from megatron.compression.report.history import check_report_directory
from megatron.compression.report.reporter import Reporter, megatron_seconds, megatron_track, track
