"""Requests over time, and the rate that a policy can serve. Skip it: no engine needs it."""
