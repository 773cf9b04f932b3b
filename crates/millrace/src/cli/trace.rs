//! Traces on the command line.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

#[derive(Debug, Args)]
pub(crate) struct TraceArgs {
    /// The device; or the volume, where no device has this name
    pub(crate) name: String,
    /// The volume of this name, whatever devices there are
    #[arg(long)]
    pub(crate) volume: bool,
    /// Where it is written [default: NAME.trace]; - is standard output
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// How long [default: until Ctrl-C]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) seconds: Option<u64>,
}

#[derive(Debug, Args)]
pub(crate) struct AnalyzeArgs {
    /// The trace
    pub(crate) file: PathBuf,
    /// What the guest traced meanwhile: its tracefs' block_rq_issue and block_rq_complete, or what blkparse prints
    #[arg(long, value_name = "FILE")]
    pub(crate) guest: Option<PathBuf>,
    /// Draw it: a page (.html), or a picture (.svg)
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
    /// Write it for another program, to the file of --out
    #[arg(long, value_enum, value_name = "FORMAT", requires = "out")]
    pub(crate) export: Option<Export>,
    /// Where the export goes
    #[arg(long, value_name = "FILE", requires = "export")]
    pub(crate) out: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Export {
    /// JSON for ui.perfetto.dev and Chrome's viewer
    Perfetto,
    /// Records of the kernel's blktrace, for blkparse and fio; its file is to be called NAME.blktrace.0
    Blktrace,
}
