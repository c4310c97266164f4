"""Types that all packages share: ids, requests, block keys, members. Standard library only."""
