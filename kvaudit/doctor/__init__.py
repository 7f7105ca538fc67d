"""What stands behind `kvaudit doctor`: what is installed and fits, and checks of what an engine does."""
