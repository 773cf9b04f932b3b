//! Migrations on the command line.

use clap::{ArgGroup, Args};
use millrace_control::Size;
use millrace_services::Node;

use super::stack;

#[derive(Debug, Args)]
#[command(group(ArgGroup::new("what").required(true).multiple(true).args(["to", "rate", "cancel"])))]
pub(crate) struct VolumeMigrate {
    /// The volume
    pub(crate) name: String,
    /// Where it goes: file:PATH (made if need be), or any stack. What lies there is lost
    #[arg(long, value_parser = stack, value_name = "EXPR|FILE")]
    pub(crate) to: Option<Node>,
    /// The part of its stack that goes: as "volume show" has it, the word that it begins with, or its place (mirror.1) [default: what lies
    /// below all that is over one leg]
    #[arg(long, value_parser = leg, value_name = "PART", requires = "to")]
    pub(crate) leg: Option<String>,
    /// Bytes per second at most: 100M; 0: as fast as it goes. Without --to, from now on
    #[arg(long, value_name = "SIZE")]
    pub(crate) rate: Option<Size>,
    /// Come back when the volume is there
    #[arg(long, conflicts_with = "cancel")]
    pub(crate) wait: bool,
    /// End the migration: the volume stays where it was
    #[arg(long, conflicts_with_all = ["to", "rate"])]
    pub(crate) cancel: bool,
}

/// A part of a stack, as the daemon writes it; what is no expression is a word.
#[expect(clippy::unnecessary_wraps, reason = "clap wants a result")]
fn leg(text: &str) -> Result<String, String> {
    Ok(stack(text).map_or_else(|_| text.to_owned(), |node| node.to_string()))
}
