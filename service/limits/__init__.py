"""What one caller, one tenant and all of them together may ask for, and what a call passes before it is work."""
