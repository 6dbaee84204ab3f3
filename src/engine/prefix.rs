//! Texts whose keys are in the cache, page by page: a tree in which every page follows the one before it. A page is found
//! by its own ids and the page that it follows, never by a hash alone, so that no two texts are taken for one another.

use std::collections::HashMap;

use super::kv::PAGE;

/// Whose texts: nobody finds those of another root. Made from what must not be shared across, such as a key of access.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Root(String);

impl Root {
    /// The root of whoever has this name.
    pub fn new(name: impl Into<String>) -> Self {
        Root(name.into())
    }
}

/// What a page follows: a root, or the number of another page's text.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Behind {
    Root(Root),
    Text(u64),
}

type Key = (Behind, Box<[u32]>);

/// What a page holds.
#[derive(Debug)]
struct Text {
    page: u32,
    /// Given once and never again, so that what followed a forgotten text is not found behind another.
    number: u64,
}

/// A page with a text.
#[derive(Debug)]
struct Kept {
    key: Key,
    /// When it was last found or kept, and how many pages stand before it.
    used: u64,
    depth: usize,
    owned: bool,
}

/// The texts.
#[derive(Debug, Default)]
pub(super) struct Prefix {
    texts: HashMap<Key, Text>,
    pages: HashMap<u32, Kept>,
    unowned: usize,
    numbers: u64,
    clock: u64,
}

impl Prefix {
    /// Pages with a text that are in no table.
    pub(super) fn unowned(&self) -> usize {
        self.unowned
    }

    /// The pages that hold the beginning of `ids`, whole pages only. Whoever asks owns them from now on.
    pub(super) fn find(&mut self, root: &Root, ids: &[u32]) -> Vec<u32> {
        self.clock += 1;
        let (mut behind, mut found) = (Behind::Root(root.clone()), Vec::new());
        for ids in ids.chunks_exact(PAGE) {
            let Some(text) = self.texts.get(&(behind, ids.into())) else { break };
            behind = Behind::Text(text.number);
            found.push(text.page);
        }
        for page in &found {
            if let Some(kept) = self.pages.get_mut(page) {
                kept.used = self.clock;
                self.unowned -= usize::from(!kept.owned);
                kept.owned = true;
            }
        }
        found
    }

    /// Keeps the text of a table's pages, as far as `ids` fill them. Where another page holds the same text already,
    /// that one stays, and what follows in this table is not kept.
    pub(super) fn keep(&mut self, root: &Root, ids: &[u32], table: &[u32]) {
        self.clock += 1;
        let mut behind = Behind::Root(root.clone());
        for (depth, (ids, page)) in ids.chunks_exact(PAGE).zip(table).enumerate() {
            let key: Key = (behind, ids.into());
            match self.texts.get(&key) {
                Some(text) if text.page == *page => {
                    behind = Behind::Text(text.number);
                    // Never older than what follows it, so that it is not forgotten before.
                    self.pages.entry(*page).and_modify(|kept| kept.used = self.clock);
                }
                Some(_) => return,
                None => {
                    self.numbers += 1;
                    behind = Behind::Text(self.numbers);
                    self.texts.insert(key.clone(), Text { page: *page, number: self.numbers });
                    self.pages.insert(*page, Kept { key, used: self.clock, depth, owned: true });
                }
            }
        }
    }

    /// Tells that a page is in no table any more. False if it holds no text, so that it is free.
    pub(super) fn leave(&mut self, page: u32) -> bool {
        let kept = self.pages.get_mut(&page);
        kept.is_some_and(|kept| {
            self.unowned += usize::from(kept.owned);
            kept.owned = false;
            true
        })
    }

    /// Forgets the text that nobody has and nobody used for longest, the end of a text before its beginning, and returns
    /// its page.
    pub(super) fn forget_oldest(&mut self) -> Option<u32> {
        let unowned = self.pages.iter().filter(|(_, kept)| !kept.owned);
        let oldest = unowned.min_by_key(|(page, kept)| (kept.used, std::cmp::Reverse(kept.depth), **page));
        let page = *oldest?.0;
        let kept = self.pages.remove(&page)?;
        self.texts.remove(&kept.key);
        self.unowned -= 1;
        Some(page)
    }
}
