"""Operations, one a file: plain-torch reference, fast path, one public function."""
