"""What runs inside vLLM's processes. Nothing of it acts unless kvaudit's engine asked for it (`plugin.ENABLED`)."""
