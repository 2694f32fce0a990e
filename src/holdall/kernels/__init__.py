"""One operation a file: plain-torch reference, fast path, one public function."""
