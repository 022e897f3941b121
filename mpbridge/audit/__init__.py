"""The audit: compares the live tensors with what the policy promised."""

from mpbridge.audit.agreement import agree
from mpbridge.audit.before import Before
from mpbridge.audit.examine import audit
from mpbridge.audit.findings import Finding, Report
from mpbridge.audit.hook import AuditHook
from mpbridge.audit.record import write_section
from mpbridge.audit.table import audit_table
from mpbridge.audit.watch import Watch

__all__ = ["AuditHook", "Before", "Finding", "Report", "Watch", "agree", "audit", "audit_table", "write_section"]
