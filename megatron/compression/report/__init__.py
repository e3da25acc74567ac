"""What users see of a run: the log line, scalars for the writers, and the report of it or of two runs."""

from megatron.compression.report.history import check_report_directory
from megatron.compression.report.reporter import Reporter
from megatron.compression.report.writers import Writers, megatron_seconds, megatron_writers
