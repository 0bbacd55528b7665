// Package onepassword reads fields of items from a 1Password Connect server. It speaks
// the documented REST interface itself: the maker's Go library takes no client, so that
// it would obey proxy variables, follow redirects with the token, wait without end and
// send traces.
package onepassword

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"waybill/inject"
	"waybill/outcome"
)

// Source returns the source of the field that spec names. Its version is the item's.
func Source(spec inject.OnePasswordSpec, token inject.Source, o inject.CacheOptions) *inject.Cached {
	return inject.NewCached(inject.KindOnePassword, func(ctx context.Context) (inject.Material, error) { return fetch(ctx, spec, token) }, o)
}

type named struct {
	ID    string `json:"id"`
	Name  string `json:"name"`
	Title string `json:"title"`
}

type item struct {
	Version int `json:"version"`
	Fields  []struct {
		ID    string  `json:"id"`
		Label string  `json:"label"`
		Value *string `json:"value"`
	} `json:"fields"`
}

func fetch(ctx context.Context, spec inject.OnePasswordSpec, token inject.Source) (inject.Material, error) {
	none := inject.Material{}
	got, err := inject.FetchRaw(ctx, token)
	if err != nil {
		return none, err
	}
	secret, err := inject.ParseSecret(got.Raw)
	if err != nil {
		return none, err
	}
	client, err := inject.HTTPClient("", 0)
	if err != nil {
		return none, err
	}
	c := &connect{ctx: ctx, client: client, base: strings.TrimRight(spec.Host, "/"), token: string(secret.Expose())}
	vault, err := c.find("/v1/vaults", "name", spec.Vault)
	if err != nil {
		return none, err
	}
	items := "/v1/vaults/" + url.PathEscape(vault) + "/items"
	id, err := c.find(items, "title", spec.Item)
	if err != nil {
		return none, err
	}
	var it item
	if err := c.get(items+"/"+url.PathEscape(id), &it); err != nil {
		return none, err
	}
	for _, f := range it.Fields {
		if (f.ID == spec.Field || f.Label == spec.Field) && f.Value != nil {
			return inject.Material{Raw: []byte(*f.Value), Version: "v" + strconv.Itoa(it.Version)}, nil
		}
	}
	return none, inject.NewError(outcome.CodeCredentialMissing, inject.ReasonNoField, nil)
}

type connect struct {
	ctx         context.Context //nolint:containedctx // one fetch
	client      *http.Client
	base, token string
}

// find returns the id of the one element of a list that has that name or id.
func (c *connect) find(path, by, want string) (string, error) {
	if strings.ContainsAny(want, `"\`) {
		return "", inject.NewError(outcome.CodeCredentialInvalid, inject.ReasonMalformed, nil)
	}
	var list []named
	if err := c.get(path+"?"+url.Values{"filter": {by + ` eq "` + want + `"`}}.Encode(), &list); err != nil {
		return "", err
	}
	if len(list) == 0 {
		list = []named{{ID: want}} // perhaps the id itself: the next request tells
	}
	if len(list) > 1 {
		return "", inject.NewError(outcome.CodeCredentialInvalid, inject.ReasonMalformed, nil) // which of them is anybody's guess
	}
	if list[0].ID == "" {
		return "", inject.NewError(outcome.CodeCredentialInvalid, inject.ReasonMalformed, nil)
	}
	return list[0].ID, nil
}

func (c *connect) get(path string, into any) error {
	req, err := http.NewRequestWithContext(c.ctx, http.MethodGet, c.base+path, nil)
	if err != nil {
		return inject.NewError(outcome.CodeCredentialInvalid, inject.ReasonMalformed, nil)
	}
	req.Header.Set("Authorization", "Bearer "+c.token)
	req.Header.Set("Accept", "application/json")
	resp, err := c.client.Do(req)
	if err != nil {
		if c.ctx.Err() != nil {
			return c.ctx.Err()
		}
		return inject.NewError(outcome.CodeCredentialUnavailable, inject.ReasonUnreachable, nil)
	}
	defer func() { _ = resp.Body.Close() }()
	switch s := resp.StatusCode; {
	case s == http.StatusNotFound:
		return inject.NewError(outcome.CodeCredentialMissing, inject.ReasonNotSet, nil)
	case s == http.StatusTooManyRequests, s >= 500:
		return inject.NewError(outcome.CodeCredentialUnavailable, inject.ReasonUnreachable, nil)
	case s == http.StatusUnauthorized, s == http.StatusForbidden:
		return inject.NewError(outcome.CodeCredentialRefused, inject.ReasonDenied, nil)
	case s != http.StatusOK:
		return inject.NewError(outcome.CodeCredentialInvalid, inject.ReasonMalformed, nil)
	}
	text, err := io.ReadAll(io.LimitReader(resp.Body, 4<<20))
	defer clear(text)
	if err != nil {
		return inject.NewError(outcome.CodeCredentialUnavailable, inject.ReasonUnreachable, nil)
	}
	if json.Unmarshal(text, into) != nil {
		return inject.NewError(outcome.CodeCredentialInvalid, inject.ReasonMalformed, nil)
	}
	return nil
}
