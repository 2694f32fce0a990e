"""Operations, one per file: plain-torch reference, fast path, one public function."""
