"""Services among records that no service wrote, and workers that break the contract."""
