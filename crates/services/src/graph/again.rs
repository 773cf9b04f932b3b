//! Whether a graph is built again as it is: from the volume's size, or from what its leaves have.

use std::sync::Arc;

use millrace_block::{BlockSize, Volume};

use super::{Built, Graph, GraphError, Leaves, Plan, is_one_of_many, sizes_of, view};
use crate::{
    background::Spawner,
    service::{self, Keeps, Layout, ServiceError},
    shared::SharedObjects,
    stack::{Leaf, Node},
};

/// Power of two of the bytes by which services that keep their size find what is at a leg's end.
const PAGE: u32 = 12;

/// What a volume is to be opened again after.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Why {
    /// It gets a size, or another stack.
    Size,
    /// It gets blocks of another size.
    Format,
    /// The same, and with that a size, which it had not: its leaves, which had what they had, must have what follows from it.
    FirstFormat,
}

/// What is asked of the parts of a volume that is to be opened again.
#[derive(Clone, Copy)]
struct Asked {
    block_size: BlockSize,
    /// Whether a part that keeps its size cannot have what it is told: of that and what it has.
    is_wrong: fn(u64, u64) -> bool,
    why: Why,
}

/// What the last leg of a service is told, now that the others are there.
pub(super) fn told_last(
    plan: &dyn service::Plan,
    size: Option<u64>,
    others: &[Arc<Built>],
    last: &Node,
    told: Option<u64>,
    block_size: BlockSize,
) -> Option<u64> {
    let Some(size) = size else { return told };
    let others: Vec<_> = others.iter().map(|leg| leg.volume.geometry().bytes()).collect();
    // What stands at its leaves they had when they were made: they may have grown since.
    let sizing = view::sizing(last);
    let least = told.or_else(|| (sizing.is_stated_below && sizing.is_plain).then_some(0));
    plan.last_size(size, &others, least, block_size).filter(|size| *size > 0)
}

/// Whether a leaf has what it is told; others have their own size whatever they are told.
fn has_what_it_is_told(leaf: &Leaf) -> bool {
    leaf.file().is_some() || leaf.spec.starts_with("nvme:")
}

impl Graph {
    /// Builds what follows `old` and has its size. The second is whether it is opened again without one, each leaf with what it has: where
    /// `own_size` says that the old one is, and a part keeps a size that does not follow from the volume's.
    ///
    /// # Errors
    /// The node that cannot be, or would not open again, and why.
    pub fn build_next(
        plan: &Plan<'_>,
        leaves: &dyn Leaves,
        shared: &SharedObjects,
        spawner: &Arc<dyn Spawner>,
        (old, own_size): (&Self, bool),
    ) -> Result<(Self, bool), GraphError> {
        let told = Self::build(plan, leaves, shared, spawner, Some(old))?;
        let asked = Asked { block_size: plan.block_size, is_wrong: |told, has| told != has, why: Why::Size };
        let checked = told.root.check_told(plan.size, asked);
        let Err(error) = checked else { return Ok((told, false)) };
        if !own_size || told.has_new_memory(old) {
            return Err(error);
        }
        // Its files must be closed before they are opened once more.
        drop(told);
        let own = Self::build(&Plan { size: None, ..plan.clone() }, leaves, shared, spawner, Some(old));
        match own {
            Ok(own) if Some(own.volume().geometry().bytes()) == plan.size && own.moves_fit() => Ok((own, true)),
            _ => Err(error),
        }
    }

    /// Whether a volume that is opened without a size may get this one: no part that keeps its size is told less than it has then.
    ///
    /// # Errors
    /// The node that would not open again, and why.
    pub fn check_first_size(&self, size: u64, block_size: BlockSize) -> Result<(), GraphError> {
        let asked = Asked { block_size, is_wrong: |told, has| told < has, why: Why::Size };
        self.root.check_told(Some(size), asked)
    }

    /// Whether a volume of so many bytes may be formatted from one size of blocks to another: whether it is opened again afterwards.
    /// `own_size` says that it is opened without a size now; where [`follows_blocks`](super::follows_blocks), it is not any more then.
    ///
    /// # Errors
    /// The node that would not open again, and why.
    pub fn check_format(&self, size: u64, own_size: bool, [now, next]: [BlockSize; 2]) -> Result<(), GraphError> {
        let after = size >> next.shift() << next.shift();
        // What is smaller than a block is the volume's to refuse.
        if now == next || after == 0 {
            return Ok(());
        }
        let asked = |block_size, why| Asked { block_size, is_wrong: |told, has| told != has, why };
        if !own_size {
            return self.root.check_told(Some(after), asked(next, Why::Format));
        }
        if !view::follows_blocks(&self.root.node) {
            let stays_so = after == size;
            return if stays_so { Ok(()) } else { self.root.check_told(Some(after), asked(next, Why::Format)) };
        }
        // It is given a size even if the format fails.
        self.root.check_told(Some(size), asked(now, Why::FirstFormat))?;
        self.root.check_told(Some(after), asked(next, Why::FirstFormat))
    }

    /// The volumes that it is made of, each with the size that it gets when this one gets `size`; without those that are told none.
    pub fn told_volumes(&self, size: u64, block_size: BlockSize) -> Vec<(String, u64)> {
        let mut told = Vec::new();
        self.root.tell_volumes(Some(size), block_size, &mut told);
        told
    }

    /// Whether leaves in memory are new: those are numbered as they are opened, once.
    fn has_new_memory(&self, old: &Self) -> bool {
        let place = |volume: &Arc<dyn Volume>| Arc::as_ptr(volume).cast::<()>();
        let had: Vec<_> = old.leaves().iter().map(|(_, volume)| place(volume)).collect();
        self.leaves().iter().any(|(leaf, volume)| is_one_of_many(leaf) && !had.contains(&place(volume)))
    }

    /// Whether each leg that goes elsewhere has as much there: asked where nobody was told so.
    fn moves_fit(&self) -> bool {
        let is_even = |node: &Built| match &node.legs[..] {
            [old, new] => old.volume.geometry().bytes() == new.volume.geometry().bytes(),
            _ => true,
        };
        self.nodes().iter().all(|node| !view::is_moving(&node.node) || is_even(node))
    }
}

impl Built {
    /// What its legs are told when it is opened again with `told`.
    fn told_legs(&self, plan: &dyn service::Plan, told: Option<u64>, block_size: BlockSize) -> Vec<Option<u64>> {
        let [_, mut sizes] = sizes_of(plan, self.node.legs(), told, block_size);
        if let (Some((last, others)), Some(of_last)) = (self.legs.split_last(), sizes.last_mut()) {
            *of_last = told_last(plan, told, others, &last.node, *of_last, block_size);
        }
        sizes
    }

    fn tell_volumes(&self, told: Option<u64>, block_size: BlockSize, into: &mut Vec<(String, u64)>) {
        if let Some(leaf) = self.node.as_leaf() {
            into.extend(leaf.volume().map(str::to_owned).zip(told));
        }
        let Some(plan) = view::plan(&self.node).filter(|_| self.absent.is_none()) else { return };
        for (leg, told) in self.legs.iter().zip(self.told_legs(&*plan, told, block_size)) {
            leg.tell_volumes(told, block_size, into);
        }
    }

    /// Refuses a part that does not open with another size than it has, and is told one that is wrong when this is opened again with `told`.
    fn check_told(&self, told: Option<u64>, asked: Asked) -> Result<(), GraphError> {
        let Some(plan) = view::plan(&self.node).filter(|_| self.absent.is_none()) else { return Ok(()) };
        let keeps = plan.keeps_size();
        if keeps {
            self.check_is(told, asked.block_size.shift(), asked)?;
        }
        if asked.why != Why::Size {
            self.check_formats(&*plan, told)?;
        }
        for (leg, told) in self.legs.iter().zip(self.told_legs(&*plan, told, asked.block_size)) {
            let has_its_own = leg.node.as_leaf().is_some_and(|leaf| !has_what_it_is_told(leaf));
            // What it keeps at a leg's end is found there.
            if keeps && !has_its_own {
                leg.check_is(told, PAGE, asked)?;
            }
            if asked.why == Why::FirstFormat && !keeps && !has_its_own {
                let shift = asked.block_size.shift();
                let is_wrong: fn(u64, u64) -> bool = |told, has| told > has;
                let grows = told.is_some_and(|told| is_wrong(told >> shift, leg.volume.geometry().bytes() >> shift));
                if grows && plan.needs_by_blocks() && view::sizing(&leg.node).keeps == Keeps::Nothing {
                    // It is made longer before anything is erased, or refuses.
                    continue;
                }
                leg.check_is(told, shift, Asked { is_wrong, ..asked })?;
            }
            leg.check_told(told, asked)?;
        }
        Ok(())
    }

    /// Refuses a format after which this would have another size, or a leg of it would not have been formatted and know that.
    fn check_formats(&self, plan: &dyn service::Plan, told: Option<u64>) -> Result<(), GraphError> {
        if plan.needs_by_blocks() && told.is_none() {
            let what = "how much it has room for depends on the size of blocks, and nothing would tell it how much it has: make another \
                        volume with blocks of that size";
            return Err(self.refused(what.to_owned()));
        }
        let Layout::OwnOf(_, which) = plan.layout(self.legs.len()) else { return Ok(()) };
        let mut beside = self.legs.iter().enumerate().filter(|(at, _)| !which.contains(at));
        match beside.find(|(_, leg)| view::follows_blocks(&leg.node)) {
            None => Ok(()),
            Some((_, leg)) => {
                let what = "it is not formatted with the volume, and keeps the blocks that it has: make another volume with blocks of \
                            that size";
                Err(leg.refused(what.to_owned()))
            }
        }
    }

    fn refused(&self, what: String) -> GraphError {
        GraphError::Service { node: self.name.clone(), source: ServiceError::Legs(what) }
    }

    /// Refuses a wrong size; what is smaller than `1 << shift` does not matter.
    fn check_is(&self, told: Option<u64>, shift: u32, asked: Asked) -> Result<(), GraphError> {
        let has = self.volume.geometry().bytes();
        let is_wrong = |told: &u64| self.absent.is_none() && (asked.is_wrong)(told >> shift, has >> shift);
        let Some(told) = told.filter(is_wrong) else { return Ok(()) };
        let what = match asked.why {
            Why::Size => {
                "make the volume larger, so that all of its legs grow, or make another one, with a size, and copy".to_owned()
            }
            Why::Format | Why::FirstFormat => {
                format!("make another volume, with a size and with blocks of {} bytes", asked.block_size.bytes())
            }
        };
        Err(self.refused(format!(
            "it has {has} bytes and would have to have {told}, which follow from the volume's size, or not open again: {what}"
        )))
    }
}
