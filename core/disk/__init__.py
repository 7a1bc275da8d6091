"""Keys and values of prefixes in files, which outlive the process."""
