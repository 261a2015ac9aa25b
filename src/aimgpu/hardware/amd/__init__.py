"""AMD Instinct GPUs, read from the kernel's own files first, changed through them or AMD's tools."""
