//! What of volumes is to be changed, and where they are to go.

use millrace_services::Node;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Size;

/// What of a volume is to be changed: its size, or its stack.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VolumeChange {
    /// Its new size. A smaller one, beyond which all is lost, needs "shrink".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub size: Option<Size>,
    /// The new size may be smaller than that of now: what lies beyond it is lost. Without it that is refused: 409, "would-shrink".
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shrink: bool,
    /// Its new stack, put in place of the old one while guests go on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub stack: Option<Node>,
    /// The stack that the new one was made from. If the volume has another one by now, it is not changed: 409, "changed-meanwhile".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub from: Option<Node>,
    /// The new stack may show other data than the old one did.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reformat: bool,
}

impl VolumeChange {
    /// What is wrong with one that is neither of a size nor of a stack.
    pub(crate) fn fault(&self) -> &'static str {
        match (&self.size, &self.stack) {
            (None, None) => "a change says its new size, or its new stack",
            (Some(_), Some(_)) => "a change is of its size, or of its stack: ask for the one and then for the other",
            (Some(_), None) => "\"reformat\" and \"from\" are of a change of its stack",
            (None, Some(_)) => "\"shrink\" is of a change of its size",
        }
    }
}

/// Where a volume is to go while guests use it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MigrationSpec {
    /// A stack: what is to have the data.
    #[schema(value_type = String, example = "file:/fast/vm0.img")]
    pub to: Node,
    /// The part of the volume's stack that goes: its expression, or the word it begins with. When left out, what lies below all that is
    /// over one leg.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leg: Option<String>,
    /// Bytes per second at most; no limit when left out, or 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub rate: Option<Size>,
}

/// How fast a migration may be from now on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MigrationChange {
    /// Bytes per second at most; 0: no limit.
    #[schema(value_type = u64)]
    pub rate: Size,
}
