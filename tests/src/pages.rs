//! What a guest's memory consists of, in tests that play the guest themselves.

use std::{
    fs,
    sync::{Mutex, PoisonError},
};

use millrace_driver::Pages;

use crate::skip;

/// MiB of huge pages for one test: for a guest of 16 MiB, the one before that is being unmapped, and a few buffers.
const MEMORY: usize = 96;
const SET_ASIDE: &str = "/proc/sys/vm/nr_hugepages";
const FREE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";

/// One test at a time changes how many the system has.
static ONE: Mutex<()> = Mutex::new(());

/// The kind of memory that a test's guests have. Huge pages that were set aside for it are given back when it is dropped.
#[derive(Debug)]
pub struct GuestMemory {
    pages: Pages,
    /// Set aside for this.
    added: usize,
}

impl GuestMemory {
    /// Pages of 4 KiB.
    pub fn small() -> Self {
        Self { pages: Pages::Small, added: 0 }
    }

    /// Pages of 2 MiB (`MFD_HUGETLB`), set aside if the system lets us. Where it has none to give, transparent ones, and the output says so.
    pub fn huge() -> Self {
        Self::huge_of(MEMORY)
    }

    /// The same, of `mib` MiB.
    pub fn huge_of(mib: usize) -> Self {
        match set_aside(mib / 2) {
            Ok(added) => Self { pages: Pages::Huge, added },
            Err(why) => {
                skip(&format!("pages set aside (MFD_HUGETLB): {why}; transparent huge pages instead"));
                Self { pages: Pages::Transparent, added: 0 }
            }
        }
    }

    /// For the options of a [`Controller`](millrace_driver::Controller).
    pub fn pages(&self) -> Pages {
        self.pages
    }

    /// Whether they are pages that were set aside.
    pub fn are_set_aside(&self) -> bool {
        self.pages == Pages::Huge
    }

    /// The same for the command line of `millrace bench`.
    pub fn word(&self) -> &'static str {
        match self.pages {
            Pages::Small => "small",
            Pages::Huge => "huge",
            Pages::Transparent => "transparent",
        }
    }
}

/// Has the system keep pages of 2 MiB for us; how many it did.
fn set_aside(pages: usize) -> Result<usize, String> {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let had = number(SET_ASIDE)?;
    match fs::write(SET_ASIDE, (had + pages).to_string()) {
        Ok(()) => {}
        // Not ours to say; there may be some.
        Err(_) if number(FREE)? >= pages => return Ok(0),
        Err(error) => return Err(format!("{SET_ASIDE}: {error}")),
    }
    let has = number(SET_ASIDE)?;
    if has < had + pages {
        let _ = fs::write(SET_ASIDE, had.to_string());
        return Err(format!("of {pages} pages the system found {}", has.saturating_sub(had)));
    }
    Ok(pages)
}

fn number(path: &str) -> Result<usize, String> {
    let text = fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
    text.trim().parse().map_err(|error| format!("{path}: {error}"))
}

impl Drop for GuestMemory {
    fn drop(&mut self) {
        let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        if self.added > 0
            && let Ok(has) = number(SET_ASIDE)
        {
            // Pages in use go when they are free.
            let _ = fs::write(SET_ASIDE, has.saturating_sub(self.added).to_string());
        }
    }
}
