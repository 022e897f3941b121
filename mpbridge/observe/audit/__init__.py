"""The audit: compares the live tensors with what the policy promised."""

from mpbridge.observe.audit.examine import audit
from mpbridge.observe.audit.findings import Finding, Report, audit_table, write_section
from mpbridge.observe.audit.hook import AuditHook
from mpbridge.observe.audit.replicas import agree
from mpbridge.observe.audit.snapshot import Before
from mpbridge.observe.audit.watch import Watch

__all__ = ["AuditHook", "Before", "Finding", "Report", "Watch", "agree", "audit", "audit_table", "write_section"]
