//! What a change of a volume's stack must not do without anybody noticing: undo somebody else's, or end a migration.

use millrace_services::{
    Node,
    migrate::{SERVICE, stacks},
};

use super::{Manager, VolumeView, volumes::look_at_files};
use crate::{error::ControlError, store::VolumeRecord};

impl Manager {
    /// Puts another stack in a volume's place while guests go on; in that of `from` only, where that is said.
    pub(super) fn change_stack_from(
        &self,
        name: &str,
        from: Option<&Node>,
        stack: &Node,
        reformat: bool,
    ) -> Result<VolumeView, ControlError> {
        look_at_files(stack);
        self.look_at_unopened();
        self.change_with(name, reformat, None, |record| {
            check_from(record, from)?;
            check_migrations(record, stack)?;
            Ok(stack.clone())
        })
    }
}

fn check_from(record: &VolumeRecord, from: Option<&Node>) -> Result<(), ControlError> {
    let spec = &record.spec;
    match from {
        Some(from) if *from != spec.stack => {
            Err(ControlError::ChangedMeanwhile { name: spec.name.clone(), stack: spec.stack.clone() })
        }
        _ => Ok(()),
    }
}

/// Whether each migration of the volume has its new place in a stack, whatever services are over it there.
fn check_migrations(record: &VolumeRecord, stack: &Node) -> Result<(), ControlError> {
    let spec = &record.spec;
    let goes_on = |to: &Node| targets(stack).into_iter().any(|other| places(other) == places(to));
    match targets(&spec.stack).into_iter().find(|to| !goes_on(to)) {
        Some(to) => Err(ControlError::Migrating { name: spec.name.clone(), to: to.clone() }),
        None => Ok(()),
    }
}

/// Where the migrations of a stack go.
fn targets(stack: &Node) -> Vec<&Node> {
    let own = stacks::migration(stack).filter(|_| stack.word() == SERVICE).map(|migration| migration.to);
    own.into_iter().chain(stack.legs().iter().flat_map(targets)).collect()
}

fn places(node: &Node) -> Vec<&str> {
    node.leaves().into_iter().map(|leaf| leaf.spec.as_str()).collect()
}
