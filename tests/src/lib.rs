//! What the tests of the whole share: the repository's places, and (in `guest`) a stock Linux guest with a daemon beside it.

use std::path::PathBuf;

/// The repository's root.
pub fn repository() -> PathBuf {
    let tests = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    tests.parent().expect("the tests live in the repository").to_path_buf()
}
